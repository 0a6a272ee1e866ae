"""Trees grown in fixed shapes, as on a GPU: unseen, and those of the host's way, on the CPU's ops,
a stand-in running again what was captured.

tests/device runs the same with a device's ops, in fewer steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout import RolloutEngine
from rollout.runner.graphs.graph_runner import GraphRunner
from spec_workers.neural.draft_graphs import DraftGraphs
from spec_workers.neural.tree_proposer import TreeProposer
from tests.helpers.compared import numbers
from tests.helpers.parity_models import FIXED, LEARNED, PARAMS, prompts
from tests.helpers.replaying import ReplayingCapture
from tests.helpers.tree_checks import check_trees

DRAFTS = {  # worker, kind of draft, options
    "eagle": ("eagle", "eagle", {}),
    "eagle3": ("eagle", "eagle3", {"num_steps": 3, "topk": 7}),
    "eagle-chain": ("eagle", "eagle", {"topk": 1}),
    "block": ("block", "dflash", {}),
    "mtp": ("mtp", "mtp", {"topk": 3}),
    "mtp-chain": ("mtp", "mtp", {"topk": 1}),
    "hybrid": ("hybrid", "eagle", {}),
    "hybrid-mtp": ("hybrid", "mtp", {"topk": 2}),
}
FEW = {"max_running": 3, "chunk_len": 7}
SCARCE = {"max_running": 8, "max_kv_tokens": 150}


def make_engine(models, name, spec_options, **options) -> RolloutEngine:
    spec, kind, own = DRAFTS[name]
    draft = models.draft("shallow", kind)
    own = {"draft_path": draft and str(draft)} | own | spec_options
    target = models.target("shallow")
    return RolloutEngine.from_pretrained(target, spec, dtype="float32", spec_options=own, **options)


def wanted(models, params):
    return numbers(models.reference("shallow", "float32", params))


@pytest.mark.parametrize(
    ("name", "options", "spec_options"),
    [
        *((name, FEW, FIXED) for name in DRAFTS),
        *((name, SCARCE, LEARNED | {"num_draft_tokens": 5}) for name in ("mtp", "hybrid")),
    ],
    ids=str,
)
def test_the_trees_are_the_hosts_and_cannot_be_seen(models, name, options, spec_options) -> None:
    engine = make_engine(models, name, spec_options, **options)
    drafter, compared, warm = engine.worker.drafter, [], []
    capture = ReplayingCapture()
    on_host = drafter._proposer
    propose = as_on_a_device(drafter, capture).propose

    def both(wanted):
        wanted = replace(wanted, token_ms_G=None)  # on a device all levels are grown
        trees = on_host.propose(wanted).trees(wanted.sizes_G, source=0)
        poison_scratch(drafter)
        proposal = propose(wanted)
        warm.append(drafter._proposer.is_warm)
        own = proposal.trees(wanted.sizes_G, source=0)
        check_trees(own)
        compared.append((own, trees))
        return proposal

    drafter._proposer.propose = both
    for params in ("greedy", "cut"):
        assert numbers(engine.generate(prompts(), PARAMS[params])) == wanted(models, params)
        engine.check_integrity()
    # A learned budget may find out soon that nothing pays.
    assert sum(own.num_nodes for own, _ in compared) > (50 if spec_options is FIXED else 0)
    for own, trees in compared:
        # Those that are closer to each other than rounding may have changed places.
        assert own.offsets_B1.tolist() == trees.offsets_B1.tolist()
        np.testing.assert_allclose(own.probs_N, trees.probs_N, rtol=1e-3, atol=1e-6)
    alike = [np.array_equal(own.masks_N, trees.masks_N) for own, trees in compared]
    assert np.mean(alike) > 0.95
    if spec_options is FIXED:
        assert engine.worker.counters()["draft/nodes"] > 50
        assert capture.replays > 3
        # Each shape compiles when it comes first, and is captured once.
        num_shapes = len(drafter._proposer._shapes)
        assert num_shapes <= warm.count(False) <= 2 * num_shapes
        assert not warm[0]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("eagle", {"num_steps": 1}),
        ("eagle3", {"num_steps": 6, "topk": 10, "num_draft_tokens": 60}),
        ("eagle3", {"num_draft_tokens": 1}),
        ("mtp-chain", {"num_steps": 2, "topk": 5}),
        ("hybrid", {"num_steps": 1, "topk": 1}),
    ],
    ids=str,
)
def test_the_smallest_and_the_largest_trees(models, name, own) -> None:
    engine = make_engine(models, name, FIXED | own, max_running=5)
    as_on_a_device(engine.worker.drafter, ReplayingCapture())
    rollouts = engine.generate(prompts(), PARAMS["greedy"])
    assert numbers(rollouts) == wanted(models, "greedy")
    assert sum(rollout.stats.drafted for rollout in rollouts) > 20
    engine.check_integrity()


def as_on_a_device(drafter, capture, **options) -> TreeProposer:
    cpu = torch.device("cpu")
    graphs = GraphRunner(
        "proposals",
        max_bytes=lambda: 50_000,
        capture=capture,
        device=cpu,
        **options,
    )
    drafter._proposer = drafter._make_proposer(DraftGraphs(proposals=graphs), on_host=False)
    return drafter._proposer


def poison_scratch(drafter) -> None:
    """Write NaN to the scratch slots: a proposal writes all that it reads."""
    for runner in drafter.runners:
        pool = runner.kv.pool
        for each in pool.keys + pool.values:
            each[runner.kv.first_scratch :] = float("nan")
            each[0] = float("nan")
