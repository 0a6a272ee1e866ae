"""The parity chain on a device: plain decoding there is what everything else must equal, bitwise.

Against the CPU's own plain decoding, tokens are the same and logprobs within what rounding allows;
of a hybrid of recurrent layers and experts they are transformers'.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.ops import gpu
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.replaying import ReplayingCapture, plain_factory
from tests.helpers.tiny_hybrid import tiny_hybrid

from .conftest import INTERPRETED

SHAPED = SamplingParams(
    temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={5: 2.0},
    min_new_tokens=3, max_new_tokens=6, n=2, seed=6,
    raw_logprobs=True, sampling_logprobs=True, top_logprobs=2, entropy=True,
)  # fmt: skip
PLAIN = SamplingParams(temperature=0.8, max_new_tokens=6, n=2, seed=5, ignore_eos=True)
PARAMS = {"plain": PLAIN, "shaped": SHAPED}
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44] * 2]
EAGER = {"graph_bytes": 0}


def make_engine(path, dtype_name: str, recorded=None, **overrides) -> RolloutEngine:
    """``recorded``: rollouts that trees are drafted from, now and then wrong. What is captured on a
    GPU is run again on the same buffers in the interpreter."""
    options = {"dtype": dtype_name, "kv_bytes": 1 << 22, "max_running": 4}
    options |= {"device": "cpu" if INTERPRETED else "cuda"} | overrides
    capture = ReplayingCapture() if INTERPRETED else None
    factory = plain_factory(capture)
    if recorded is not None:
        truth = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in recorded}
        factory = oracle_factory(truth, capture, size=5, right=0.8, chain=False)
    return RolloutEngine.from_config(engine_config(str(path), options), factory)


def run(engine, name="plain"):
    rollouts = engine.generate(PROMPTS, PARAMS[name])
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0
    return rollouts


@pytest.fixture(scope="module")
def plain(small_model_path, dtype_name):
    """Each request's prompt whole, no graphs, no drafts, no cache."""
    engine = make_engine(small_model_path, dtype_name, prefix_cache=False, **EAGER)
    return {name: run(engine, name) for name in PARAMS}


@pytest.mark.parametrize("name", PARAMS)
def test_the_cpu_says_the_same(small_model_path, dtype_name, plain, name, monkeypatch) -> None:
    if dtype_name != "float32":
        pytest.skip("a token may differ where bfloat16 rounds another way")
    monkeypatch.setattr(gpu, "_INTERPRETED", False)  # else the CPU's tensors are the interpreter's
    engine = RolloutEngine.from_pretrained(
        str(small_model_path), spec="none", dtype=dtype_name, device="cpu", kv_bytes=1 << 20
    )
    assert not gpu.runs_on(engine.worker.target.model.device)
    on_cpu = engine.generate(PROMPTS, PARAMS[name])
    assert [r.token_ids for r in on_cpu] == [r.token_ids for r in plain[name]]
    for ours, rollout in zip(on_cpu, plain[name], strict=True):
        np.testing.assert_allclose(ours.logprobs, rollout.logprobs, rtol=0, atol=1e-4)


def test_company_chunks_and_the_cache_cannot_be_seen(small_model_path, dtype_name, plain) -> None:
    engine = make_engine(small_model_path, dtype_name, max_running=3, chunk_len=4, **EAGER)
    assert numbers(run(engine)) == numbers(plain["plain"])


@pytest.mark.parametrize("name", ["plain", "shaped"])
def test_trees_and_graphs_cannot_be_seen(small_model_path, dtype_name, plain, name) -> None:
    engine = make_engine(small_model_path, dtype_name, plain[name])
    for _ in range(1 if INTERPRETED else 3):
        rollouts = run(engine, name)
        assert numbers(rollouts) == numbers(plain[name])
        assert sum(r.stats.accepted for r in rollouts) > 0
    assert engine.worker.target.graphs.graph_runner.num_graphs > 0


@pytest.mark.parametrize("name", PARAMS)
def test_score_is_what_generation_reported(small_model_path, dtype_name, plain, name) -> None:
    engine = make_engine(small_model_path, dtype_name, chunk_len=6, **EAGER)
    rollout = plain[name][-1]
    logprobs, extras = engine.score_with_extras(rollout.prompt_ids, rollout.token_ids, PARAMS[name])
    assert logprobs == rollout.logprobs
    assert extras == rollout.extras


def test_memory_comes_back_and_nothing_is_changed_by_it(
    small_model_path, dtype_name, plain
) -> None:
    engine = make_engine(small_model_path, dtype_name)
    assert numbers(run(engine)) == numbers(plain["plain"])
    freed = engine.release_memory(["kv_cache", "weights", "graphs"])
    assert freed["kv_cache"] > 0
    assert freed["weights"] > 0
    engine.resume_memory()
    assert numbers(run(engine)) == numbers(plain["plain"])


def test_a_hybrid_says_what_transformers_says_with_trees_chunks_and_graphs(tmp_path) -> None:
    layers = ("linear_attention", "full_attention")
    theirs = tiny_hybrid("qwen3_5", layer_types=layers, experts=True)
    theirs.save_pretrained(tmp_path)
    plain = run(make_engine(tmp_path, "float32", prefix_cache=False, **EAGER))
    for rollout in plain:
        tokens = torch.tensor(rollout.prompt_ids + rollout.token_ids)
        with torch.inference_mode():
            logits = theirs(tokens[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
        chosen = tokens[len(rollout.prompt_ids) :, None]
        expected = (logits / PLAIN.temperature).log_softmax(-1).gather(1, chosen)[:, 0]
        ours = torch.tensor(rollout.logprobs, dtype=torch.float32)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)
    for graph_bytes in (0, 1 << 28):
        options = {"max_running": 3, "chunk_len": 4, "graph_bytes": graph_bytes}
        engine = make_engine(tmp_path, "float32", plain, **options)
        rollouts = run(engine)
        assert numbers(rollouts) == numbers(plain)
        assert sum(r.stats.accepted for r in rollouts) > 0
        graphs = engine.worker.target.graphs
        assert (graphs is None) == (graph_bytes == 0)
        assert graphs is None or graphs.graph_runner.num_graphs > 0
