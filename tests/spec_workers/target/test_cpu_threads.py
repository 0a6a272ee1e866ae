"""An engine on a CPU uses as many threads as run its forwards fastest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from rollout.config import engine_config
from spec_workers.target import TargetWorker, cpu_threads
from spec_workers.target.cpu_threads import choose_threads, may_choose_threads

WHERE_TORCH_IS_IMPORTED = """
import os, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
import rollout.cli
"""


@pytest.fixture(autouse=True)
def two_threads(monkeypatch) -> Iterator[None]:
    """Torch begins with a thread for each of two CPUs, and nobody asked for another number."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """Its clock, and forwards that take so many seconds by the number of threads."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.forwards_run = 0
        monkeypatch.setattr(cpu_threads, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def forward(self, *seconds: float, differs: bool = False) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            threads = torch.get_num_threads()
            self.now += seconds[threads - 1]
            self.forwards_run += 1
            return torch.full((1, 4), threads if differs else 0)

        return run


def test_one_thread_where_two_wait_for_each_other(monkeypatch, caplog):
    caplog.set_level("INFO")
    choose_threads({1: Machine(monkeypatch).forward(0.071, 0.199)})
    assert torch.get_num_threads() == 1
    assert "CPU threads: 1 (num_threads sets another number)" in caplog.text
    assert "71.0 ms with 1, 199.0 ms with 2" in caplog.text


@pytest.mark.parametrize(
    ("one", "two"), [((0.02, 0.011), (0.05, 0.03)), ((0.019, 0.02), (0.029, 0.03))]
)
def test_two_threads_unless_one_is_clearly_faster(monkeypatch, one, two):
    machine = Machine(monkeypatch)
    choose_threads({1: machine.forward(*one), 32: machine.forward(*two)})
    assert torch.get_num_threads() == 2


def test_all_widths_count(monkeypatch):
    machine = Machine(monkeypatch)
    choose_threads({1: machine.forward(0.01, 0.02), 32: machine.forward(0.03, 0.02)})
    assert torch.get_num_threads() == 1


def test_a_busy_moment_decides_nothing(monkeypatch):
    machine = Machine(monkeypatch)
    forward = machine.forward(0.02, 0.011)

    def stalled() -> torch.Tensor:
        machine.now += 0.2 * (machine.forwards_run == 1)
        return forward()

    choose_threads({1: stalled})
    assert torch.get_num_threads() == 2


def test_a_number_that_changes_a_bit_is_not_taken(monkeypatch):
    choose_threads({1: Machine(monkeypatch).forward(0.071, 0.199, differs=True)})
    assert torch.get_num_threads() == 2


def test_a_large_model_is_not_waited_for(monkeypatch):
    machine = Machine(monkeypatch)
    choose_threads({1: machine.forward(2.0, 9.0), 32: machine.forward(2.0, 9.0)})
    assert torch.get_num_threads() == 2
    assert machine.forwards_run <= 3


def test_what_the_user_said_stands(monkeypatch):
    assert may_choose_threads()
    torch.set_num_threads(3)
    assert not may_choose_threads()
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not may_choose_threads()


def test_an_engine_chooses_as_it_starts(tiny_model_path, caplog):
    caplog.set_level("INFO", "spec_workers.target.cpu_threads")
    target = TargetWorker(engine_config(str(tiny_model_path), {"max_kv_tokens": 1024}))
    assert "ms with 1, " in caplog.text
    assert f", {torch.get_num_threads()} threads" in target.description
    assert target.memory.usage.used == 0
    target.memory.check_integrity()


def test_num_threads_is_not_measured(tiny_model_path, caplog):
    caplog.set_level("INFO", "spec_workers.target.cpu_threads")
    options = {"max_kv_tokens": 1024, "num_threads": 2}
    TargetWorker(engine_config(str(tiny_model_path), options))
    assert not caplog.text
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "5"}, "5"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_idle_threads_soon_yield_their_core(given, expected):
    own = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-c", WHERE_TORCH_IS_IMPORTED]
    ended = subprocess.run(
        command, env=environment | given, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == expected
