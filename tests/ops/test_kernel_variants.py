"""A batch of another size compiles nothing: what kernels are specialised on is the model's."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.models.layers.grouped_linear import GroupedLinear
from rollout.models.layers.linear import Linear
from rollout.ops import tree_accept
from rollout.ops.grouped_matmul import RowGroups
from rollout.ops.matmul.tiles import Tile, tile_for, tiles
from rollout.runner.batch_layout import StepArrays
from rollout.runner.dummy_run import DummyRun
from rollout.runner.profile_run import warm_rows, warm_up
from rollout.sampling.sampler import sample_trees
from tests.helpers.recorded_launches import RecordedOps, num_variants, recorded_launches
from tests.helpers.replaying import ReplayingCapture, plain_factory
from tests.helpers.requests import make_batch
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_model import save_tiny_llama


@pytest.mark.parametrize("save", [save_tiny_llama, save_tiny_hybrid])
def test_steps_of_any_size_run_kernels_that_are_warm(tmp_path, save) -> None:
    path = save(tmp_path / "model")
    engine = RolloutEngine.from_pretrained(path, spec="none", kv_bytes=1 << 24, max_running=130)
    rng = random.Random(0)
    with recorded_launches() as launches:
        runner = engine.worker.target.runner
        runner._minimum_rows = 1  # as on a GPU
        warm_up(DummyRun(runner.model), rows=1000, sampled=800)
        first = num_variants(launches)
        for entries in (1, 16, 130):
            for max_nodes in (0, 5):
                parts = [
                    (
                        rng.randrange(90),
                        rng.choice([1, 1, 1, 16, 30]),
                        rng.randrange(max_nodes + 1),
                    )
                    for _ in range(entries)
                ]
                batch, trees = make_batch(parts)
                logits = runner.forward(batch, trees).logits_RV
                sample_trees(batch, trees, logits)
                batch.entries[-1].request.params = SamplingParams(top_p=0.9, min_new_tokens=200)
                sample_trees(batch, trees, logits)
    assert num_variants(launches) == first
    assert first["_attention_kernel"] == first["_work_list_kernel"] == 2, "with nodes and without"
    assert first["_fold_kernel"] == 1


# Of one bucket each: 16 rows, 4 entries, with draft nodes and without.
LIKE_STEPS = [
    ([(4, 1, 0), (9, 1, 3), (0, 7, 1)], [(80, 1, 1), (30, 1, 9), (60, 1, 0), (200, 2, 1)]),
    ([(0, 13, 0), (2, 1, 0), (2, 2, 0)], [(80, 3, 0), (30, 1, 0), (60, 8, 0), (200, 2, 0)]),
]


@pytest.mark.parametrize("options", [{}, {"experts": True}], ids=["dense", "sparse"])
def test_steps_of_a_bucket_launch_the_same(tmp_path, monkeypatch, options) -> None:
    """A graph fixes kernels, their grids and arguments, and torch's own ops: a bucket's steps share
    all."""
    make = GroupedLinear.__init__

    def stacked(self, *sizes_and_weights, bias) -> None:
        """Make experts as on a GPU, where they share one weight."""
        *sizes, weights = sizes_and_weights
        make(self, *sizes, replace(weights, stacked=True), bias=bias)

    monkeypatch.setattr(GroupedLinear, "__init__", stacked)
    path = save_tiny_hybrid(tmp_path / "model", **options)
    config = engine_config(path, {"max_running": 4})
    target = plain_factory(ReplayingCapture())(config).target
    for steps in LIKE_STEPS:
        launched = []
        for parts in steps:
            batch, trees = make_batch(parts)
            step = StepArrays.of(batch, trees, target.memory.req_to_token.table)
            sent = target.graphs.send(step.with_states(batch, trees), None)
            with recorded_launches() as launches, RecordedOps(launches), torch.inference_mode():
                target.runner._hidden(sent.inputs, sent.bucket.longest)
            launched.append(launches)
        assert launched[0] == launched[1]
        kernels = set(num_variants(launches))
        assert {"_causal_conv_kernel", "_gated_delta_rule_kernel", "_attention_kernel"} <= kernels
        assert ("_grouped_matmul_kernel" in kernels) == bool(options)


ROWS = (1, 2, 3, 8, 16, 17, 100, 256)


def sampled(rows: int) -> None:
    from rollout.ops.categorical.triton import categorical, entropy, token_logprobs
    from rollout.ops.truncation.triton import truncation_threshold
    from rollout.ops.uniforms.triton import uniforms

    logits, ones = torch.zeros(rows, 3000), torch.ones(rows)
    threshold = truncation_threshold(logits, ones, ones.int(), ones, ones)
    numbers = uniforms(ones.long(), ones.long())
    for each in (None, threshold):
        tokens, _ = categorical(logits, ones, numbers, each)
    token_logprobs(logits, ones, tokens)
    entropy(logits, ones)
    offsets = torch.arange(rows + 1)
    tree_accept.accept(tokens, offsets, tokens.int(), tokens.int(), tokens, offsets)


def multiplied(rows: int) -> None:
    from rollout.ops.grouped_matmul.triton import tiled_grouped_matmul
    from rollout.ops.matmul.triton import tiled_matmul

    x, weights = torch.zeros(rows, 48), torch.zeros(7, 32, 48)
    groups = RowGroups.of(torch.zeros(rows, 3, dtype=torch.int32), 7)
    for tile in tiles(torch.float32):
        tiled_matmul(x, weights[0], None, tile)
        tiled_grouped_matmul(x, weights, groups, tile)
        tiled_grouped_matmul(x[:1].expand(rows * 3, -1), weights, groups, tile)


@pytest.mark.parametrize("run", [sampled, multiplied])
def test_any_number_of_rows_runs_the_same_kernels(run) -> None:
    with recorded_launches() as launches:
        run(5)
        first = num_variants(launches)
        for rows in ROWS:
            run(rows)
    assert first
    assert num_variants(launches) == first


@pytest.mark.parametrize("max_rows", [1, 20, 300, 8192])
def test_warm_rows_run_every_tile_of_products(monkeypatch, max_rows) -> None:
    """Every tile that a later product uses was run, whichever tiles products leave out."""
    monkeypatch.setattr("rollout.ops.gpu.multiprocessors", lambda device: 132)
    linears = [
        Linear(8, outputs, dtype=torch.bfloat16, device=torch.device("cpu"))
        for outputs in (128, 1024, 2560, 4096, 6144, 28_672, 128_256)
    ]
    for linear in linears:
        linear.row_invariant = True
    linears[2].left_out_tiles = frozenset({tile_for(torch.bfloat16, max_rows, 2560, 132)})
    warm = warm_rows(max_rows, linears)
    assert min(warm) == 1
    assert max(warm) == max_rows
    assert warm[1], "with draft nodes too"
    assert warm[max_rows]
    for linear in linears:
        outputs, left_out = linear.out_features, linear.left_out_tiles
        ran, wanted = (
            {tile_for(torch.bfloat16, rows, outputs, 132, left_out) for rows in some}
            for some in (warm, range(1, max_rows + 1))
        )
        assert ran == wanted, outputs


@pytest.mark.parametrize(("num_experts", "chosen"), [(128, 8), (512, 10), (8, 2)])
def test_warm_rows_run_every_tile_of_experts(monkeypatch, num_experts, chosen) -> None:
    from rollout.ops.grouped_matmul import triton

    monkeypatch.setattr(triton, "multiprocessors", lambda device: 132)
    ran: set[Tile] = set()
    monkeypatch.setattr(
        triton, "tiled_grouped_matmul", lambda x, weights, groups, tile: ran.add(tile)
    )
    for outputs in (768, 1536, 2048, 14_336):
        weights = torch.empty(num_experts, outputs, 1, dtype=torch.bfloat16, device="meta")
        found = []
        for some in (warm_rows(6000, []), range(1, 6001)):
            ran.clear()
            for rows in some:
                pairs = torch.empty(rows * chosen, dtype=torch.int32, device="meta")
                groups = RowGroups(pairs_S=pairs, offsets_N1=pairs)
                triton.grouped_matmul(weights[:1, 0], weights, groups)
            found.append(set(ran))
        assert found[0] == found[1] != set(), outputs
