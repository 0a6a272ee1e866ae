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
from rollout.ops.matmul.tiles import tile_for
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


@pytest.mark.parametrize("max_rows", [1, 300, 8192])
def test_warm_rows_run_every_tile_of_products(monkeypatch, max_rows) -> None:
    """Every tile that a later product uses was run, whichever tiles products leave out."""
    monkeypatch.setattr("rollout.ops.gpu.multiprocessors", lambda device: 132)
    linears = [
        Linear(8, outputs, dtype=torch.bfloat16, device=torch.device("cpu"))
        for outputs in (128, 1024, 2560, 6144, 28_672, 128_256)
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
