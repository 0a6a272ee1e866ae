"""A target with recurrent layers and experts on a device: transformers' numbers, and bitwise the
same with trees, chunks and graphs."""

from __future__ import annotations

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.replaying import ReplayingCapture
from tests.helpers.tiny_hybrid import tiny_hybrid

from .conftest import INTERPRETED

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=5, n=2, seed=5, ignore_eos=True)
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 40]]
FAMILY, LAYERS = "qwen3_5", ("linear_attention", "full_attention")


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_hybrid(FAMILY, layer_types=LAYERS, experts=True).save_pretrained(folder)
    return str(folder)


def engine_options(**overrides) -> dict:
    options = {"dtype": "float32", "kv_bytes": 1 << 22, "max_running": 4, "graph_bytes": 0}
    return options | {"device": "cpu" if INTERPRETED else "cuda"} | overrides


@pytest.fixture(scope="module")
def plain(hybrid_path):
    engine = RolloutEngine.from_pretrained(
        hybrid_path, spec="none", **engine_options(prefix_cache=False)
    )
    return engine.generate(PROMPTS, PARAMS)


def test_logprobs_are_those_of_transformers(plain) -> None:
    theirs = tiny_hybrid(FAMILY, layer_types=LAYERS, experts=True)
    for rollout in plain:
        tokens = torch.tensor(rollout.prompt_ids + rollout.token_ids)
        with torch.inference_mode():
            logits = theirs(tokens[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
        chosen = tokens[len(rollout.prompt_ids) :, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        ours = torch.tensor(rollout.logprobs, dtype=torch.float32)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("graph_bytes", [0, 1 << 28])
def test_trees_chunks_and_graphs_cannot_be_seen(hybrid_path, plain, graph_bytes) -> None:
    recorded = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in plain}
    capture = ReplayingCapture() if INTERPRETED else None
    factory = oracle_factory(recorded, capture, size=5, right=0.8, chain=False)
    options = engine_options(max_running=3, chunk_len=4, graph_bytes=graph_bytes)
    engine = RolloutEngine.from_config(engine_config(hybrid_path, options), factory)
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert numbers(rollouts) == numbers(plain)
    graphs = engine.worker.target.graphs
    assert (graphs is None) == (graph_bytes == 0)
    assert graphs is None or graphs.graph_runner.num_graphs > 0
    assert sum(r.stats.accepted for r in rollouts) > 0
    engine.check_integrity()
