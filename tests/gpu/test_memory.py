"""KV is sized by what is free, the largest step fits beside it, and sleep gives memory back."""

from __future__ import annotations

import gc

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from tests.helpers.tiny_model import save_tiny_llama

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, repetition_penalty=1.1)


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module")
def wide_model_path(tmp_path_factory):
    """Its logits and activations are some hundred MiB in the largest step."""
    return save_tiny_llama(
        tmp_path_factory.mktemp("wide"), vocab_size=32_000, hidden_size=512, num_heads=8,
        num_kv_heads=8, intermediate_size=2048, max_positions=4096, dtype=torch.bfloat16,
    )  # fmt: skip


def make(path, **overrides):
    return RolloutEngine.from_pretrained(path, spec="none", device="cuda", **overrides)


def test_kv_takes_its_share_of_what_steps_and_graphs_leave(wide_model_path) -> None:
    graph_bytes, fraction = 1 << 28, 0.5
    before = free_bytes()
    engine = make(
        wide_model_path, kv_fraction=fraction, graph_bytes=graph_bytes, max_kv_tokens=1 << 40
    )
    pool = engine.worker.target.kv_pool
    held = 2 * sum(keys.nbytes for keys in pool.keys)
    assert held < (before - graph_bytes) * fraction
    assert held > (before - graph_bytes) * fraction * 0.8
    tokens = list(range(3, 1000))
    engine.generate([tokens, *([5, index] for index in range(80))], PARAMS)
    engine.check_integrity()


def test_what_sleeps_is_free_for_others_and_wakes_as_it_was(wide_model_path) -> None:
    engine = make(wide_model_path, kv_bytes=1 << 30, max_running=8)
    prompts = [[5, 6, 7], list(range(3, 200))]
    before = [r.token_ids for r in engine.generate(prompts, PARAMS)]
    awake = free_bytes()
    freed = engine.release_memory(["kv_cache", "weights", "graphs"])
    asleep = free_bytes()
    assert freed["kv_cache"] > 0.99 * (1 << 30)
    assert asleep - awake >= 0.95 * sum(freed.values())
    engine.resume_memory()
    assert abs(free_bytes() - awake) < (1 << 28)
    assert [r.token_ids for r in engine.generate(prompts, PARAMS)] == before
