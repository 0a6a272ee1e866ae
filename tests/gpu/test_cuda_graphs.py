"""CUDA graphs as torch makes them: see tests/device for parity, and tests/runner/test_graphs.py for
what a stand-in can show."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.runner.memory_regions import MemoryRegions
from tests.helpers.compared import numbers

PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 9, [5, 6, 7, 12], [40, 41]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=40, seed=3, n=2, ignore_eos=True)
NAME, SHAPE = "model.layers.0.mlp.down_proj.weight", (48, 80)


def make(path, **overrides):
    options = {"device": "cuda", "dtype": "bfloat16", "max_running": 8, "kv_bytes": 1 << 24}
    return RolloutEngine.from_pretrained(path, spec="none", **(options | overrides))


def generated(engine):
    found = numbers(engine.generate(PROMPTS, PARAMS))
    engine.check_integrity()
    return found


@pytest.fixture(scope="module")
def eager(tiny_model_path):
    engine = make(tiny_model_path, graph_bytes=0)
    assert engine.worker.target.graphs is None
    return generated(engine)


def test_updates_in_place_reach_what_was_captured(tiny_model_path) -> None:
    engines = [make(tiny_model_path), make(tiny_model_path, graph_bytes=0)]
    before = [generated(engine) for engine in engines]
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) / 9
    captured = engines[0].worker.target.graphs.graph_runner.num_graphs
    for engine in engines:
        engine.update_weights_from_tensor([(NAME, tensor)], partial=True)
    after = [generated(engine) for engine in engines]
    assert engines[0].worker.target.graphs.graph_runner.num_graphs >= captured > 0
    assert before[0] == before[1] != after[0] == after[1]


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["kv_cache", "weights", "graphs"]])
def test_what_sleeps_may_wake_elsewhere(tiny_model_path, eager, tags, monkeypatch) -> None:
    monkeypatch.setattr(MemoryRegions, "on", lambda device: MemoryRegions())
    engine = make(tiny_model_path)
    assert generated(engine) == eager
    engine.release_memory(tags)
    assert engine.worker.target.graphs.graph_runner.num_graphs == 0
    blocker = torch.empty(1 << 24, device="cuda")  # where weights or KV may have been
    engine.resume_memory()
    assert generated(engine) == eager
    assert engine.worker.target.graphs.graph_runner.num_graphs > 0
    del blocker


def test_graphs_survive_sleep_at_preserved_addresses(tiny_model_path, eager) -> None:
    pytest.importorskip("torch_memory_saver")
    engine = make(tiny_model_path)
    assert engine.worker.memory_saver.regions.preserve_addresses
    assert generated(engine) == eager
    captured = engine.worker.target.graphs.graph_runner.num_graphs
    freed = engine.release_memory()
    assert freed["kv_cache"] >= 1 << 24
    blocker = torch.full((1 << 24,), 7.0, device="cuda")
    engine.resume_memory()
    assert generated(engine) == eager
    assert engine.worker.target.graphs.graph_runner.num_graphs == captured
    del blocker
    held = engine.worker.target.graphs.graph_runner.num_bytes
    assert engine.release_memory(["graphs"]) == {"graphs": held}


def test_a_forward_that_cannot_be_captured_runs_without(tiny_model_path, eager, caplog) -> None:
    engine = make(tiny_model_path)
    model = engine.worker.target.model
    forward = model.forward

    def synchronizing(*arguments, **keywords):
        hidden = forward(*arguments, **keywords)
        hidden.sum().item()  # not permitted while a stream is captured
        return hidden

    model.forward = synchronizing
    with caplog.at_level(logging.WARNING):
        assert generated(engine) == eager
    assert "without graphs" in caplog.text
    assert engine.worker.target.graphs.graph_runner.failure
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.randn(3, device="cuda")  # its generator, too, knows that nothing is captured
    assert generated(engine) == eager


def test_a_gpu_that_is_not_the_threads_own_says_the_same(tiny_model_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = []
    for device in ("cuda:0", "cuda:1"):
        engine = make(tiny_model_path, device=device)
        thread = threading.Thread(
            target=lambda engine=engine: found.append((generated(engine), generated(engine)))
        )
        thread.start()
        thread.join()
        assert engine.worker.target.graphs.graph_runner.num_graphs > 0
        assert not engine.worker.target.graphs.graph_runner.failure
    assert found[0] == found[1]
