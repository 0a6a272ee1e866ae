"""Captured forwards: their shapes, their padding, and that nobody can see them.

A stand-in runs what was captured again, on tensors at the same places, as a CUDA graph does.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.runner.batch_layout import StepArrays
from rollout.runner.dummy_run import DummyRun
from rollout.runner.graphs import Bucket, Buckets
from rollout.runner.profile_run import activation_bytes, run_largest, warm_up
from spec_workers.budget import FixedBudget, LearnedBudget
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.replaying import ReplayingCapture, plain_factory
from tests.helpers.requests import decode_batch, make_request, make_trees
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_moe import save_tiny_moe

BUCKETS = Buckets(max_rows=100)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 9, [5, 6, 7, 12], [40, 41]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=20, seed=3, n=2, ignore_eos=True)


def step_of(trees) -> StepArrays:
    """Requests of nine tokens decode, with trees below them."""
    context = 9
    batch = decode_batch([make_request([1] * context, request_id=b) for b in range(len(trees))])
    for b, entry in enumerate(batch.entries):
        entry.request.row = b
    table = np.arange(len(trees) * context, dtype=np.int32).reshape(len(trees), context)
    return StepArrays.of(batch, make_trees(trees), table)


def generated(engine):
    return numbers(engine.generate(PROMPTS, PARAMS))


def plain_engine(path, capture, **overrides):
    overrides = {"max_running": 8} | overrides
    return RolloutEngine.from_config(engine_config(path, overrides), plain_factory(capture))


@pytest.mark.parametrize(
    ("trees", "bucket"),
    [
        ([([], [])], Bucket(1, 0)),
        ([([], [])] * 5, Bucket(8, 0)),
        ([([1], [0])] * 5, Bucket(16, 16)),
        ([([1, 2], [0, 1]), ([], []), ([3], [0])], Bucket(8, 8)),
        ([([1], [0])] * 33, Bucket(72, 72)),
        ([([], [])] * 96, Bucket(96, 0)),
        ([([], [])] * 97, None),
        ([], None),
    ],
)
def test_a_step_goes_to_the_least_bucket_that_holds_it(trees, bucket) -> None:
    assert BUCKETS.bucket(step_of(trees)) == bucket


def test_fine_buckets_pad_by_an_eighth_at_most_and_a_cpus_always_have_nodes() -> None:
    fine = Buckets(max_rows=128, minimum_rows=3, fine=True, always_nodes=True)
    assert fine.rows[:15] == (*range(3, 17), 18)
    assert fine.rows[-3:] == (112, 120, 128)
    assert all(large / small <= 9 / 8 for small, large in pairwise(fine.rows) if small >= 16)
    for trees in ([([], [])] * 17, [([1, 2], [0, 1])] * 6):
        assert fine.bucket(step_of(trees)) == Bucket(rows=18, nodes=18)
    assert fine.bucket(step_of([([], [])] * 129)) is None


@pytest.fixture(scope="module")
def folders(tiny_model_path, tmp_path_factory):
    hybrid = tmp_path_factory.mktemp("hybrid")
    return {
        "dense": tiny_model_path,
        "sparse": save_tiny_moe(tmp_path_factory.mktemp("sparse")),
        "hybrid": save_tiny_hybrid(hybrid, "qwen3_next", experts=True),
    }


@pytest.mark.parametrize(
    ("model", "dtype", "chain"),
    [
        ("dense", "float32", False),
        ("dense", "bfloat16", True),
        ("sparse", "bfloat16", False),
        ("hybrid", "float32", True),
        ("hybrid", "bfloat16", False),
    ],
)
def test_graphs_cannot_be_seen(folders, model, dtype, chain) -> None:
    """Runs of several tokens, chains, branching trees, states of prefixes that are kept."""
    options = {"dtype": dtype, "max_running": 5, "chunk_len": 7}
    plain = RolloutEngine.from_pretrained(folders[model], spec="none", **options, graph_bytes=0)
    rollouts = plain.generate(PROMPTS, PARAMS)
    truth = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in rollouts}
    capture = ReplayingCapture()
    factory = oracle_factory(truth, capture, size=9, right=0.7, chain=chain)
    engine = RolloutEngine.from_config(engine_config(folders[model], options), factory)
    for _ in range(2):
        assert generated(engine) == numbers(rollouts)
    assert capture.replays > 10
    buckets = {bucket for bucket, _ in engine.worker.target.graphs.graph_runner._graphs}
    assert {bucket.nodes > 0 for bucket in buckets} == {True, False}
    engine.check_integrity()


def test_no_more_is_captured_than_may_be(tiny_model_path) -> None:
    capture = ReplayingCapture()
    engine = plain_engine(tiny_model_path, capture, graph_bytes=0)
    expected = generated(engine)
    assert engine.worker.target.row_buckets == ()
    assert not capture.captures
    engine = plain_engine(tiny_model_path, capture, graph_rows=8)
    assert generated(engine) == expected
    assert max(engine.worker.target.row_buckets) == 8
    for bound in ({"graph_bytes": -1}, {"graph_rows": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(bound))):
            RolloutEngine.from_pretrained(tiny_model_path, **bound)


def test_the_cost_curve_knows_what_is_padded(tiny_model_path) -> None:
    config = engine_config(tiny_model_path, {"max_running": 8, "graph_rows": 64})
    worker = plain_factory(ReplayingCapture())(config)
    curve = LearnedBudget.for_target(worker.target, ["ngram"], 0.02).costs.plain
    assert set(worker.target.row_buckets) <= set(curve.rows_H)
    curve.observe(33, 2.0)
    rows = np.array([33, 40, 48, 49])
    times = curve.milliseconds(rows)
    assert times[0] == times[1] == times[2] < times[3]


def test_the_largest_step_can_be_tried_before_there_is_kv(tiny_model_path) -> None:
    model = RolloutEngine.from_pretrained(tiny_model_path, spec="none").worker.target.model
    steps = DummyRun(model, AuxHiddenStates(layers=(1,)))
    hidden_TE = steps.forward(40, nodes=40)
    assert hidden_TE.shape == (40, 48)
    assert hidden_TE.isfinite().all()
    run_largest(steps, rows=40, sampled=7)
    warm_up(steps, rows=40, sampled=7)
    assert activation_bytes(steps, rows=40, sampled=7) == 0, "on the CPU nothing is measured"


def test_no_budget_learns_from_forwards_that_were_captured_or_came_in_a_new_shape(
    tiny_model_path,
) -> None:
    capture, forwards = ReplayingCapture(), []

    class Noting(FixedBudget):
        def observe(self, batch, verified, results, times):
            forwards.append((times.forward, len(capture.captures)))

    config = engine_config(tiny_model_path, {"prefix_cache": False})
    engine = RolloutEngine.from_config(
        config,
        lambda config, progress=None: PlainWorker(
            TargetWorker(config, progress, capture=capture), Noting()
        ),
    )
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    engine.generate([[5, 6, 7]], params)
    captured = [count for _, count in forwards]
    # The prompt and the first decode are new shapes, unless padding makes them one.
    before = [0, *captured]
    assert [milliseconds > 0 for milliseconds, _ in forwards] == [
        count == known for count, known in zip(captured, before, strict=False)
    ]
    assert forwards[-1][0] > 0
    assert math.isnan(forwards[0][0])
