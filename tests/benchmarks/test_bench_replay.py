"""A replay through the engine says what was recorded, whatever drafts."""

from __future__ import annotations

import time

import bench_replay
import numpy as np
import pytest
import torch
from bench_replay import replay
from forced import force_draft, waves
from harness.roofline import Ceilings
from harness.shapes import Shape, write_config, write_draft
from harness.traces import Trace, trace_of

from rollout.runner.graphs.graph_runner import GraphRunner
from spec_workers.neural.arrays import DeviceArrays
from tests.helpers.replaying import ReplayingCapture

SHAPE = Shape(
    hidden_size=32, num_layers=7, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48,
    vocab_size=300,
)  # fmt: skip
CEILINGS = Ceilings(name="", bytes_per_second=1e9, flop_per_second=1e12)


@pytest.fixture
def trace() -> Trace:
    """Two steps of four responses to two prompts; each repeats a phrase of its prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 9).astype(np.int32) for _ in range(2)]
    responses = [np.tile(prompts[r % 2], 3)[: 12 + r] for r in range(8)]
    return trace_of("small", prompts, responses, np.arange(8) % 2, [[0, 1, 2, 3], [4, 5, 6, 7]])


@pytest.mark.parametrize("spec", ["none", "ngram", "hybrid"])
def test_every_rollout_is_the_recorded_one(tmp_path, trace, spec) -> None:
    draft = write_draft(tmp_path / "draft", SHAPE)
    options = bench_replay.spec_options(spec, 4, draft)
    if spec != "none":
        options |= {"budget": "fixed", "calibration_seconds": 0.0}
    result = replay(
        write_config(tmp_path / "model", SHAPE), SHAPE, trace,
        spec=spec, spec_options=options, active=4, num_waves=None, ceilings=CEILINGS, hit_rate=1.0,
        overrides={"device": "cpu", "dtype": "float32", "kv_bytes": 1 << 22},
    )  # fmt: skip
    assert result.total.tokens == trace.num_tokens
    assert [spent.tokens for spent in result.by_wave] == [54, 70]
    assert sum(spent.steps for spent in result.by_running.values()) == result.total.steps
    if spec == "none":
        assert result.total.accept_length == 1
    else:
        assert result.total.accept_length > 1.5


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("topk", [1, 3])
def test_a_draft_is_told_what_was_recorded_as_often_as_is_said(
    tmp_path, trace, monkeypatch, on_device, topk
) -> None:
    """On a GPU all levels are launched, and captured, without a look at what came out."""

    def force(drafter, *args) -> None:
        if on_device:
            cpu = torch.device("cpu")
            graphs = GraphRunner(
                "proposals", max_bytes=lambda: 1 << 20, capture=ReplayingCapture(), device=cpu
            )
            drafter._proposer = drafter._make_proposer(DeviceArrays(cpu), graphs)
        force_draft(drafter, *args)

    monkeypatch.setattr("bench_replay.force_draft", force)
    options = {
        "draft_path": str(write_draft(tmp_path / "draft", SHAPE)), "num_draft_tokens": 6,
        "topk": topk, "num_steps": 3, "budget": "fixed", "calibration_seconds": 0.0,
    }  # fmt: skip
    lengths = [
        replay(
            write_config(tmp_path / "model", SHAPE), SHAPE, trace,
            spec="eagle", spec_options=options, active=4, num_waves=None, ceilings=CEILINGS,
            hit_rate=hit_rate, overrides={"device": "cpu", "dtype": "float32", "kv_bytes": 1 << 22},
        ).total.accept_length
        for hit_rate in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    assert lengths[0] < 1.2
    assert 1.3 < lengths[1] < 2.5
    assert lengths[2] > 2.7


def test_what_is_not_recorded_is_an_error(tmp_path, trace, monkeypatch) -> None:
    monkeypatch.setattr("bench_replay.force_target", lambda *_: None)
    with pytest.raises(RuntimeError, match="not the recorded one"):
        replay(
            write_config(tmp_path / "model", SHAPE), SHAPE, trace,
            spec="none", spec_options={}, active=4, num_waves=1, ceilings=CEILINGS, hit_rate=1.0,
            overrides={"device": "cpu", "dtype": "float32", "kv_bytes": 1 << 22},
        )  # fmt: skip


def test_steps_of_the_trace_are_joined_until_enough_run(trace) -> None:
    assert waves(trace, 4, None) == trace.steps
    assert waves(trace, 5, None) == [list(range(8))]
    assert waves(trace, 1, 1) == trace.steps[:1]


def test_the_floor_of_a_forward_by_hand() -> None:
    weights = SHAPE.num_layers * (2 * 3 * 16 + 3 * 48) * 32 + 300 * 32
    kv = 2 * 7 * 1 * 16 * 100
    assert CEILINGS.forward_ms(SHAPE, 4, 2, 100) == pytest.approx(1e3 * 2 * (weights + kv) / 1e9)
    many = CEILINGS.forward_ms(SHAPE, 10**6, 2, 0)
    flop = 2 * (10**6 * (weights - 9600) + 2 * 9600)
    assert many == pytest.approx(1e3 * flop / 1e12)


def test_ceilings_are_measured_in_moments_on_any_cpu() -> None:
    started = time.process_time()
    ceilings = Ceilings.of(torch.device("cpu"))
    assert ceilings.name == "CPU"
    assert ceilings.bytes_per_second > 1e8
    assert ceilings.flop_per_second > 1e8
    assert time.process_time() - started < 20
