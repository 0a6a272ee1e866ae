"""An engine's work between steps: scoring, sleep, updates, and captures that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout import SamplingParams
from rollout.runner.graphs.capture import CudaCapture, GraphTooLargeError
from tests.helpers.fake_cuda import FakeGpu, Kind
from tests.helpers.fake_cuda.models import make_engine, send_weights

PARAMS = SamplingParams(max_new_tokens=5, ignore_eos=True, top_p=0.9, raw_logprobs=True)


def test_an_engine_scores_sleeps_wakes_and_is_updated(gpu: FakeGpu, tmp_path) -> None:
    engine = make_engine(tmp_path, "demo", exact=False, nodes=3, max_kv_tokens=4096)
    assert engine.worker.target.kv_pool.num_slots == 4096
    prompts = [[5, 6, 7], [8] * 40]
    engine.generate(prompts, PARAMS)
    graphs = engine.worker.target.graphs
    captured = graphs.graph_runner.num_graphs
    assert captured > 0
    send_weights(engine)
    assert graphs.graph_runner.num_graphs == captured  # weights were written where they are
    with gpu.seen.since() as seen:
        engine.score_with_extras([5, 6, 7], [8, 9], PARAMS)
    assert not [str(event) for event in seen.of(Kind.STALL, Kind.FORBIDDEN)]
    for tags in (["kv_cache"], ["kv_cache", "weights", "graphs"]):
        freed = engine.release_memory(tags)
        assert freed["kv_cache"] > 0
        assert graphs.graph_runner.num_graphs == 0
        engine.resume_memory()
        send_weights(engine)
        engine.generate(prompts, replace(PARAMS, max_new_tokens=2))  # no shape comes twice
        assert graphs.graph_runner.num_graphs > 0
    assert not graphs.graph_runner.failure
    assert not {problem for launch in gpu.launches.all for problem in launch.problems}


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
