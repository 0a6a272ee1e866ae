"""An engine on a CPU uses as many threads as run its forwards fastest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from rollout.config import engine_config
from spec_workers.target import TargetWorker, cpu_threads
from spec_workers.target.cpu_threads import choose_threads, may_choose_threads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch) -> Iterator[None]:
    """Torch begins with a thread for each of two CPUs, and no other number is set."""
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


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ((0.071, 0.199), (0.071, 0.199), 1),  # two wait for each other
        ((0.01, 0.02), (0.03, 0.02), 1),  # all widths count
        ((0.02, 0.011), (0.05, 0.03), 2),
        ((0.019, 0.02), (0.029, 0.03), 2),  # not clearly faster
        ((2.0, 9.0), (2.0, 9.0), 2),  # a large model is not waited for
    ],
)
def test_fewer_threads_are_used_where_they_are_clearly_faster(
    monkeypatch, caplog, one, other, count
):
    caplog.set_level("INFO")
    machine = Machine(monkeypatch)
    choose_threads({1: machine.forward(*one), 32: machine.forward(*other)})
    assert torch.get_num_threads() == count
    assert f"CPU threads: {count} (num_threads=N overrides)" in caplog.text or one[0] > 1
    assert one[0] < 1 or machine.forwards_run <= 3


def test_neither_a_busy_moment_nor_a_number_that_changes_a_bit_decides(monkeypatch):
    machine = Machine(monkeypatch)
    forward = machine.forward(0.02, 0.011)

    def stalled() -> torch.Tensor:
        machine.now += 0.2 * (machine.forwards_run == 1)
        return forward()

    choose_threads({1: stalled})
    assert torch.get_num_threads() == 2
    choose_threads({1: machine.forward(0.071, 0.199, differs=True)})
    assert torch.get_num_threads() == 2


def test_a_number_that_the_user_set_stands(monkeypatch):
    assert may_choose_threads()
    torch.set_num_threads(3)
    assert not may_choose_threads()
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert not may_choose_threads()


def test_an_engine_chooses_as_it_starts_unless_it_is_told_a_number(tiny_model_path, caplog):
    caplog.set_level("INFO", "spec_workers.target.cpu_threads")
    target = TargetWorker(engine_config(str(tiny_model_path), {"max_kv_tokens": 1024}))
    assert "ms with 1, " in caplog.text
    assert target.memory.usage.used == 0
    target.memory.check_integrity()
    caplog.clear()
    TargetWorker(engine_config(str(tiny_model_path), {"max_kv_tokens": 1024, "num_threads": 2}))
    assert not caplog.text
    assert torch.get_num_threads() == 2
