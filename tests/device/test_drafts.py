"""Neural drafts on a device: unseen, and one read for each proposal.

That their trees are the host's way's is tested in tests/parity/test_device_drafts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from rollout import RolloutEngine, SamplingParams
from spec_workers.neural import arrays, tree_proposer
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
    chain = save_tiny_mtp(folder / "mtp", "separate", 3, likely=True)
    own = {"num_steps": 3, "topk": 2}
    return {
        "eagle3": (small_model_path, "eagle", {"draft_path": str(eagle3), **own}),
        "mtp": (chain[0], "mtp", {"draft_path": str(chain[1]), "topk": 2}),
        "chain": (chain[0], "mtp", {"draft_path": str(chain[1])}),
        "hybrid": (small_model_path, "hybrid", {"draft_path": str(eagle3), **own}),
    }


def make_engine(path, spec: str, dtype_name: str, spec_options=None, **overrides):
    options = {"dtype": dtype_name, "kv_bytes": 1 << 20, "max_running": 6, "graph_bytes": 0}
    options |= {"device": "cpu" if INTERPRETED else "cuda"} | overrides
    return RolloutEngine.from_pretrained(str(path), spec=spec, spec_options=spec_options, **options)


def run(engine) -> list:
    """All requests at once, whatever they ask for."""
    asked = zip(PROMPTS, PARAMS, strict=True)
    ids = [engine.submit(prompt, params).request_id for prompt, params in asked]
    ended = {}
    while engine.has_unfinished:
        ended |= {rollout.request_id: rollout for rollout in engine.step()}
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0
    return [ended[each] for each in ids]


@pytest.fixture(scope="module")
def plain(drafts, dtype_name):
    return {
        path: numbers(run(make_engine(path, "none", dtype_name, prefix_cache=False)))
        for path in {path for path, *_ in drafts.values()}
    }


@pytest.mark.parametrize("graph_bytes", [0] if INTERPRETED else [0, 1 << 28])
@pytest.mark.parametrize("name", ["eagle3", "mtp", "chain", "hybrid"])
def test_drafts_cannot_be_seen(drafts, dtype_name, plain, name, graph_bytes) -> None:
    path, spec, options = drafts[name]
    engine = make_engine(path, spec, dtype_name, TREES | options, graph_bytes=graph_bytes)
    assert numbers(run(engine)) == plain[path]
    counters = engine.worker.counters()
    assert counters["draft/trees"] > 1
    assert counters["draft/nodes"] > 1


@contextmanager
def waits(monkeypatch) -> Iterator[list[str]]:
    """The names of operations within that read a device's tensors, or would wait for them."""
    seen: list[str] = []
    names = ("cpu", "numpy", "item", "tolist", "__bool__", "__int__", "__float__", "nonzero",
             "masked_select", "unique", "__index__")  # fmt: skip
    reads = {getattr(torch.Tensor, name): name for name in names}
    reads |= {torch.nonzero: "nonzero", torch.unique: "unique"}

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in reads:
                seen.append(reads[func])
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                if any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in index):
                    seen.append("mask")
                if any(isinstance(i, (list, np.ndarray)) for i in index):
                    seen.append("host index")
            if func is torch.Tensor.to or func in (torch.tensor, torch.from_numpy):
                seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def passed_over(function, name=""):
        def call(*args, **kwargs):
            if name:
                seen.append(name)
            with torch._C.DisableTorchFunction():
                return function(*args, **kwargs)

        return call

    for module, name in ((tree_proposer, "upload"), (arrays, "download")):
        monkeypatch.setattr(module, name, passed_over(getattr(module, name), name))
    if INTERPRETED:  # it computes in numpy itself
        from triton.runtime.interpreter import GridExecutor

        call = passed_over(GridExecutor.__call__)
        monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kw: call(*args, **kw))
    with Mode():
        yield seen


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_proposal_is_sent_once_and_read_once(drafts, dtype_name, name, monkeypatch) -> None:
    path, spec, options = drafts[name]
    engine = make_engine(path, spec, dtype_name, TREES | options)
    propose = engine.worker.drafter._proposer.propose
    calls, levels = [], []

    def watched(wanted):
        with monkeypatch.context() as patches, waits(patches) as seen:
            proposal = propose(wanted)
        calls.append(seen)
        levels.append(proposal.num_levels)
        return proposal

    engine.worker.drafter._proposer.propose = watched
    engine.generate(PROMPTS[:1], replace(PARAMS[0], max_new_tokens=6))
    assert max(levels) == 2
    assert all(seen == ["upload", "download"] for seen in calls), calls
