"""Captured work is work that CUDA can capture, and a failed capture leaves torch as it was."""

from __future__ import annotations

import pytest
import torch

from rollout import SamplingParams
from rollout.runner.graphs.capture import CudaCapture, GraphTooLargeError
from tests.helpers.fake_cuda import FakeGpu, Kind
from tests.helpers.fake_cuda.models import make_engine

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


def test_after_a_capture_that_fails_steps_go_on_where_they_were(gpu: FakeGpu, tmp_path) -> None:
    engine = make_engine(tmp_path, "demo", exact=False)
    model, stream = engine.worker.target.model, torch.cuda.current_stream()
    forward = model.forward

    def waiting(*arguments, **keywords):
        hidden = forward(*arguments, **keywords)
        torch.cuda.current_stream().synchronize()  # not permitted in a capture
        return hidden

    model.forward = waiting
    engine.generate([[5, 6, 7]], PARAMS)
    assert engine.worker.target.graphs.graph_runner.failure
    assert torch.cuda.current_stream() is stream
    assert not gpu.seen.generator_captures
    assert not gpu.seen.of(Kind.REPLAY)


def test_what_a_run_takes_is_known_before_it_is_captured(gpu: FakeGpu, monkeypatch) -> None:
    reserved = [1 << 30]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved[0])

    def run() -> dict[str, torch.Tensor]:
        reserved[0] += 3000
        return {}

    capture = CudaCapture(torch.device("cuda", 0))
    with pytest.raises(GraphTooLargeError) as raised:
        capture(run, dict, 2999)
    assert raised.value.num_bytes == 3000
    assert not gpu.seen.of(Kind.CAPTURE)
    capture(run, dict, 3000)
    assert len(gpu.seen.of(Kind.CAPTURE)) == 1
