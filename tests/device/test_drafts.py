"""Neural drafts on a device cannot be seen.

Their trees are the host's: tests/parity/test_device_drafts.py. A proposal waits once:
tests/fake_cuda.
"""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from tests.helpers.compared import numbers
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_mtp import save_tiny_mtp

from .conftest import INTERPRETED

PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44]]
PARAMS = [
    SamplingParams(temperature=0.8, max_new_tokens=4, seed=5, ignore_eos=True),
    SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True),
]
TREES = {"budget": "fixed", "calibration_seconds": 0, "num_draft_tokens": 5}


@pytest.fixture(scope="session")
def drafts(tmp_path_factory, small_model_path) -> dict[str, tuple]:
    """By name: the target's folder, the worker and its options."""
    folder = tmp_path_factory.mktemp("drafts")
    small = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32}
    eagle3 = save_tiny_eagle3(
        folder / "eagle3", small_model_path, layers=(0, 1), draft_vocab_size=40, unsorted=True,
        **small,
    )  # fmt: skip
    chain = save_tiny_mtp(folder / "mtp", "mimo", 3, likely=True)
    own = {"num_steps": 3, "topk": 2}
    return {
        "eagle3": (small_model_path, "eagle", {"draft_path": str(eagle3), **own}),
        "mtp": (chain, "mtp", {"topk": 2}),
        "chain": (chain, "mtp", {}),
        "hybrid": (small_model_path, "hybrid", {"draft_path": str(eagle3), **own}),
    }


def make_engine(path, spec: str, dtype_name: str, spec_options=None, **overrides):
    options = {"dtype": dtype_name, "kv_bytes": 1 << 20, "max_running": 6, "graph_bytes": 0}
    options |= {"device": "cpu" if INTERPRETED else "cuda"} | overrides
    return RolloutEngine.from_pretrained(str(path), spec=spec, spec_options=spec_options, **options)


def run(engine) -> list:
    rollouts = engine.generate(PROMPTS, PARAMS)
    engine.check_integrity()
    return numbers(rollouts)


@pytest.fixture(scope="module")
def plain(drafts, dtype_name):
    return {
        path: run(make_engine(path, "none", dtype_name, prefix_cache=False))
        for path in {path for path, *_ in drafts.values()}
    }


@pytest.mark.parametrize("graph_bytes", [0] if INTERPRETED else [0, 1 << 28])
@pytest.mark.parametrize("name", ["eagle3", "mtp", "chain", "hybrid"])
def test_drafts_cannot_be_seen(drafts, dtype_name, plain, name, graph_bytes) -> None:
    path, spec, options = drafts[name]
    engine = make_engine(path, spec, dtype_name, TREES | options, graph_bytes=graph_bytes)
    assert run(engine) == plain[path]
    counters = engine.worker.counters()
    assert counters["draft/trees"] > 1
    assert counters["draft/nodes"] > 1
