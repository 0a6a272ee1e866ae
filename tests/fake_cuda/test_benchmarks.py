"""A GPU session's benchmarks run on a pretended GPU, which computes no values."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_gpu_ops
import bench_sleep
import decoding
import gpu_kernels
import gpu_smoke
from bench_step import shape_rows
from harness.roofline import Ceilings
from harness.shapes import Shape

from rollout.ops.glu import silu_mul
from tests.helpers.fake_cuda import FakeGpu
from tests.helpers.fake_cuda.models import send_weights

SHAPE = Shape(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48,
    vocab_size=300,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _weights_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended device has no generator."""
    monkeypatch.setattr(decoding, "send_random_weights", send_weights)


def test_steps_are_judged_and_what_sleeps_is_captured_again(gpu: FakeGpu, monkeypatch) -> None:
    ceilings = Ceilings(name="a pretended H200", bytes_per_second=4e12, flop_per_second=8e14)
    monkeypatch.setattr(Ceilings, "of", staticmethod(lambda device, floors: ceilings))
    options = argparse.Namespace(
        batch=[8], context=80, device="cuda", nodes=8, lengths=["even"], floors=None, tokens=24
    )
    rows = {row.name: row for row in shape_rows("8b", SHAPE, options)}
    assert all(row.value is not None for row in rows.values())
    assert rows["8b, 80 keys, batch 8, exact, 8 draft nodes each / none"].bar == 1.15
    options.batch = 3
    slept = {
        row.name.split(": ")[1]: row.value for row in bench_sleep.shape_rows("", SHAPE, options)
    }
    assert slept["graphs captured"] > 0
    assert slept["graphs captured after it"] > 0


@pytest.mark.parametrize("check", ["attention", "sampler"])
def test_checks_mix_no_devices(gpu: FakeGpu, monkeypatch, check: str) -> None:
    monkeypatch.setattr(gpu_smoke, "_rows_that_differ", lambda one, other: one.shape != other.shape)
    monkeypatch.setattr(gpu_smoke, "CONTEXTS", (100,))
    rows = list(gpu_smoke.CHECKS[check]("cuda"))
    assert len(rows) >= 2
    assert all(row.ok for row in rows)
    assert gpu.launches


def test_every_op_of_a_step_goes_a_gpus_way_and_is_added_up(gpu: FakeGpu, monkeypatch) -> None:
    def once(calls) -> float:
        calls[0]()
        return 1.0

    ceilings = Ceilings(name="a pretended H200", bytes_per_second=4e12, flop_per_second=8e14)
    monkeypatch.setattr(Ceilings, "of", staticmethod(lambda device, floors: ceilings))
    monkeypatch.setattr(bench_gpu_ops, "microseconds", once)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: ceilings.name)
    rows = {
        row.name: row for row in bench_gpu_ops.timed_rows(argparse.Namespace(floors=None), "step")
    }
    assert all(row.value is not None for row in rows.values())
    # Four products, two norms, and three more in each of 32 layers; the head and the draw.
    assert rows["ops of a step, 8 requests"].value == 32 * 9 + 2
    assert rows["8 requests: 8 draft nodes each / none"].bar == 1.15
    assert gpu.launches


def test_what_a_session_launches_is_compiled_before_it(tmp_path: Path, monkeypatch) -> None:
    def part() -> None:
        for rows in (3, 4):  # one variant
            silu_mul(torch.empty((rows, 128), dtype=torch.bfloat16, device="cuda"))

    (variant,) = gpu_kernels.recorded([part, part])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gpu_kernels.build(variant)
    assert list(tmp_path.rglob("*.cubin"))
