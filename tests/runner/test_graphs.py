"""Captured forwards: their shapes, their bound, and that nobody can see them.

A stand-in runs what was captured again, on tensors at the same places, as a CUDA graph does.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.errors import InvalidInputError
from rollout.memory.device_slot_table import DeviceSlotTable
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.ops.transfers import DeviceBuffer
from rollout.runner.batch_layout import StepArrays
from rollout.runner.dummy_run import DummyRun
from rollout.runner.graphs import Bucket, Buckets
from rollout.runner.profile_run import activation_bytes, run_largest, warm_up
from rollout.runner.step_states import StateInputs
from spec_workers.budget import FixedBudget, LearnedBudget
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.replaying import ReplayingCapture, plain_factory
from tests.helpers.requests import decode_batch, make_request, make_trees
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_moe import save_tiny_moe

BUCKETS = Buckets(max_rows=100, max_context_len=20_000)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11] * 9, [5, 6, 7, 12], [40, 41]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=20, seed=3, n=2, ignore_eos=True)


def step_of(trees, context: int = 9) -> StepArrays:
    """Requests of so many tokens decode, with trees below them."""
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


@pytest.fixture(scope="module")
def eager(tiny_model_path):
    return generated(RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=8))


@pytest.fixture(scope="module")
def recorded(tiny_model_path):
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=8)
    rollouts = engine.generate(PROMPTS, PARAMS)
    return {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in rollouts}


def test_rows_are_doubled_where_padding_costs_little_and_then_go_up_by_a_quarter() -> None:
    assert BUCKETS.rows == (1, 2, 4, 8, 16, 32, 48, 64, 80, 96)
    assert Buckets(max_rows=64, max_context_len=10, minimum_rows=5).rows[0] == 8
    rows = Buckets(max_rows=1024, max_context_len=10).rows
    assert rows[-1] == 1024
    assert len(rows) == 24
    steps = [(large / small, small) for small, large in pairwise(rows)]
    assert max(step for step, _ in steps) <= 2
    assert max(step for step, small in steps if small >= 64) <= 1.25


@pytest.mark.parametrize(
    ("trees", "context", "bucket"),
    [
        ([([], [])], 9, Bucket(1, 1, 0, 1024)),
        ([([], [])] * 5, 1024, Bucket(8, 8, 0, 1024)),
        ([([], [])] * 9, 1025, Bucket(16, 16, 0, 2048)),
        ([([], [])] * 80, 9, Bucket(80, 80, 0, 1024)),
        ([([1], [0])] * 5, 9, Bucket(16, 16, 16, 1024)),
        ([([1, 2], [0, 1]), ([], []), ([3], [0])], 5000, Bucket(8, 4, 8, 8192)),
        ([([], [])] * 96, 20_000, Bucket(96, 96, 0, 20_000)),
        ([([], [])] * 97, 9, None),
        ([], 9, None),
    ],
)
def test_a_step_goes_to_the_least_bucket_that_holds_it(trees, context, bucket) -> None:
    assert BUCKETS.bucket(step_of(trees, context)) == bucket


def test_fine_buckets_pad_by_an_eighth_at_most_and_a_cpus_have_all_entries() -> None:
    fine = Buckets(max_rows=128, max_context_len=300, minimum_rows=3, fine=True, pads_entries=True)
    assert fine.rows[:15] == (*range(3, 17), 18)
    assert fine.rows[-3:] == (112, 120, 128)
    assert all(large / small <= 9 / 8 for small, large in pairwise(fine.rows) if small >= 16)
    for trees in ([([], [])] * 17, [([1, 2], [0, 1])] * 6):
        rows, longest = 18, 300
        assert fine.bucket(step_of(trees)) == Bucket(
            rows=rows, entries=rows, nodes=rows, longest=longest
        )
    assert fine.bucket(step_of([([], [])] * 129)) is None


def test_padding_is_nobodys() -> None:
    step = step_of([([1, 2], [0, 1]), ([], [])])
    padded = step.padded(rows=6, entries=4, nodes=6)
    assert padded.num_rows == step.num_rows == 4
    assert padded.input_ids_T.tolist() == [1, 1, 2, 1, 0, 0]
    assert padded.positions_T.tolist() == [8, 9, 10, 8, 0, 0]
    assert padded.slots_T.tolist()[4:] == [0, 0]
    assert padded.q_offsets_B1.tolist() == [0, 3, 4, 4, 4]
    assert padded.node_offsets_B1.tolist() == [0, 2, 2, 2, 2]
    assert padded.run_lens_B.tolist() == [1, 1, 1, 1]
    assert padded.starts_B.tolist() == [8, 8, 0, 0]
    assert padded.node_masks_N.tolist() == [3, 7, 1, 1, 1, 1]
    assert padded.node_slots_N.tolist() == [0, 1, 0, 0, 0, 0]
    for name, array in vars(step).items():
        if isinstance(array, np.ndarray):
            assert getattr(padded, name).dtype == array.dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_cannot_be_seen(tiny_model_path, dtype) -> None:
    options = {"dtype": dtype, "max_running": 8}
    plain = RolloutEngine.from_pretrained(tiny_model_path, spec="none", **options)
    capture = ReplayingCapture()
    engine = plain_engine(tiny_model_path, capture, **options)
    assert generated(engine) == generated(plain)
    assert capture.replays > 10
    engine.check_integrity()


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_graphs_of_trees_cannot_be_seen(tiny_model_path, eager, recorded, chain) -> None:
    capture = ReplayingCapture()
    factory = oracle_factory(recorded, capture, size=9, right=0.7, chain=chain)
    config = engine_config(tiny_model_path, {"max_running": 5, "chunk_len": 7})
    engine = RolloutEngine.from_config(config, factory)
    assert generated(engine) == eager
    assert generated(engine) == eager
    assert capture.replays > 10
    assert {bucket.nodes > 0 for bucket, _ in engine.worker.target.graphs.graph_runner._graphs} == {
        True,
        False,
    }
    engine.check_integrity()


@pytest.fixture(scope="module")
def sparse_path(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory):
    return save_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3_next", experts=True)


@pytest.mark.parametrize("path", ["sparse_path", "hybrid_path"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_of_experts_and_recurrent_layers_cannot_be_seen(path, dtype, request) -> None:
    """Runs of several tokens, chains, branching trees, states of prefixes that are kept."""
    path = request.getfixturevalue(path)
    options = {"dtype": dtype, "max_running": 5, "chunk_len": 7}
    plain = RolloutEngine.from_pretrained(path, spec="none", **options)
    rollouts = plain.generate(PROMPTS, PARAMS)
    expected = numbers(rollouts)
    truth = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in rollouts}
    for chain in (True, False):
        capture = ReplayingCapture()
        factory = oracle_factory(truth, capture, size=9, right=0.7, chain=chain)
        engine = RolloutEngine.from_config(engine_config(path, options), factory)
        assert generated(engine) == expected
        assert generated(engine) == expected
        assert capture.replays > 10
        engine.check_integrity()


def test_padding_has_no_state_and_keeps_none() -> None:
    step = step_of([([1, 2], [0, 0]), ([], [])])
    lists = {"sources_B": [5, 6], "parents_T": [-1, 0, 0, -1], "targets_T": [1, 2, 3, 4]}
    states = StateInputs(**{k: np.array(v, dtype=np.int32) for k, v in lists.items()})
    padded = replace(step, states=states).padded(rows=6, entries=4, nodes=6).states
    assert padded.sources_B.tolist() == [5, 6, 0, 0]
    assert padded.parents_T.tolist() == [-1, 0, 0, -1, -1, -1]
    assert padded.targets_T.tolist() == [1, 2, 3, 4, 0, 0]
    assert {array.dtype for array in vars(padded).values()} == {np.dtype(np.int32)}


def test_the_largest_bucket_fits_where_inputs_are_placed() -> None:
    step = step_of([([1] * 5, [0] * 5)] * 15)
    names = ("sources_B", "parents_T", "targets_T")
    states = StateInputs(**dict.fromkeys(names, step.rows_B))
    padded = replace(step, states=states, sampled_R=step.sampled_R[:0])
    padded = padded.padded(rows=96, entries=96, nodes=96)
    buffer = DeviceBuffer(BUCKETS.input_bytes, torch.device("cpu"))
    assert buffer.send(padded) is not None


def test_a_shape_is_captured_when_it_comes(tiny_model_path) -> None:
    capture = ReplayingCapture()
    engine = plain_engine(tiny_model_path, capture)
    graphs = engine.worker.target.graphs
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    engine.generate([[5]], params)  # the prompt runs alone, and so does the first token
    assert (graphs.graph_runner.num_graphs, capture.replays) == (1, 1)
    engine.generate([[5]], params)
    assert (graphs.graph_runner.num_graphs, capture.replays) == (1, 3)
    assert graphs.graph_runner.num_bytes == 1000


def test_features_are_those_of_the_rows_and_have_graphs_of_their_own(tiny_model_path) -> None:
    capture = ReplayingCapture()
    engine = plain_engine(tiny_model_path, capture)
    other = RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=8)
    kept: dict[str, list] = {"with": [], "without": []}
    for name, worker in (("with", engine.worker), ("without", other.worker)):
        worker.observe = lambda step, name=name: kept[name].append(
            step.forwarded.features_TF.clone()
        )
    one = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for features in (
        AuxHiddenStates(),
        AuxHiddenStates(layers=(1,), final=True),
        AuxHiddenStates(final=True),
    ):
        for each in (engine, other):
            each.worker.target.runner.features = features
            each.generate([[5, 6]], one)
    assert [tuple(f.shape) for f in kept["with"]] == [tuple(f.shape) for f in kept["without"]]
    assert {f.shape[1] for f in kept["with"]} == {0, 48, 96}
    assert all(map(torch.equal, kept["with"], kept["without"]))
    assert capture.replays > 3


def test_outgrown_graphs_go_together_and_come_back_more_slowly(tiny_model_path, eager) -> None:
    capture = ReplayingCapture(num_bytes=1000)
    engine = plain_engine(tiny_model_path, capture, graph_bytes=1500)
    graphs = engine.worker.target.graphs
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    captures = []
    for width in (3, 6, 2, 3, 6, 2):
        engine.generate([[5]] * width, params)
        assert graphs.graph_runner.num_bytes <= 1500
        captures.append(len(capture.captures))
    assert generated(engine) == eager
    # Of two shapes in turns the second is one graph too many: after 1 use, then after 2, then 4.
    assert captures == [1, 3, 5, 5, 6, 6]
    assert capture.resets == 3


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_capture_that_fails_is_told_and_lived_without(
    tiny_model_path, eager, caplog, fails_at
) -> None:
    capture = ReplayingCapture(fails_at=fails_at)
    engine = plain_engine(tiny_model_path, capture)
    with caplog.at_level(logging.WARNING):
        assert generated(engine) == eager
        engine.generate([[5]], PARAMS)  # another shape
        assert generated(engine) == eager
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "operation not permitted" in warning
    assert "without graphs" in warning
    assert len(capture.captures) == fails_at
    assert engine.worker.target.graphs.graph_runner.num_graphs == 0


def test_nothing_is_captured_while_the_memory_of_graphs_is_away(tiny_model_path, eager) -> None:
    engine = plain_engine(tiny_model_path, ReplayingCapture())
    graphs = engine.worker.target.graphs
    assert generated(engine) == eager
    held = graphs.graph_runner.num_bytes
    assert engine.release_memory(["graphs"]) == {"graphs": held}
    assert generated(engine) == eager
    assert graphs.graph_runner.num_graphs == 0
    engine.resume_memory(["graphs"])
    assert generated(engine) == eager
    assert graphs.graph_runner.num_graphs > 0


def test_updates_leave_graphs_valid(tiny_model_path) -> None:
    capture = ReplayingCapture()
    engine = plain_engine(tiny_model_path, capture)
    other = RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=8)
    generated(engine)
    captured = engine.worker.target.graphs.graph_runner.num_graphs
    name = "model.layers.0.mlp.down_proj.weight"
    shape = (48, 80)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 9
    for each in (engine, other):
        each.update_weights_from_tensor([(name, tensor)], partial=True)
    assert engine.worker.target.graphs.graph_runner.num_graphs == captured > 0
    assert generated(engine) == generated(other)


def test_nothing_is_captured_where_nothing_may_be(tiny_model_path, eager) -> None:
    options = {"graph_bytes": 0}
    engine = RolloutEngine.from_pretrained(tiny_model_path, "none", **options)
    assert engine.worker.target.graphs is None
    capture = ReplayingCapture()
    engine = plain_engine(tiny_model_path, capture, graph_bytes=0)
    assert generated(engine) == eager
    assert engine.worker.target.row_buckets == ()
    assert not capture.captures
    engine = plain_engine(tiny_model_path, capture, graph_rows=8)
    assert generated(engine) == eager
    assert max(engine.worker.target.row_buckets) == 8


@pytest.mark.parametrize(("field", "value"), [("graph_bytes", -1), ("graph_rows", 0)])
def test_bad_bounds_are_named(tiny_model_path, field, value) -> None:
    with pytest.raises(InvalidInputError, match=field):
        RolloutEngine.from_pretrained(tiny_model_path, **{field: value})


def test_the_cost_curve_knows_what_is_padded(tiny_model_path) -> None:
    config = engine_config(tiny_model_path, {"max_running": 8, "graph_rows": 64})
    worker = plain_factory(ReplayingCapture())(config)
    curve = LearnedBudget.for_target(worker.target, ["ngram"], 0.02).cost.curve
    assert set(worker.target.row_buckets) <= set(curve.rows_H.tolist())
    curve.observe(33, 100, 2.0)
    rows = np.array([33, 40, 48, 49])
    times = curve.milliseconds(rows, 100)
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


def test_on_the_cpu_the_devices_table_is_the_hosts() -> None:
    memory = KVCacheManager(20, 2, 10, prefix_cache=False)
    table = DeviceSlotTable(memory, torch.device("cpu"))
    memory.req_to_token.table[1, 3] = 7
    assert table.tensor[1, 3] == 7


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
