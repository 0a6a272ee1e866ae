"""A batch of another size compiles nothing: what kernels are specialised on is the model's."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from rollout import RolloutEngine
from rollout.ops import tree_accept
from rollout.ops.grouped_matmul import RowGroups
from rollout.types import Batch, Scheduled, ScheduledStates
from tests.helpers.launched_variants import Variants, launched_variants
from tests.helpers.requests import make_request, make_trees
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_model import save_tiny_llama

Part = tuple[int, int, int]  # of a step: start, tokens of the run, draft nodes

# One row, a wide one, each with draft nodes and without, and a prefill.
FIRST_STEPS = [
    [(4, 1, 0)],
    [(4, 1, 0)] * 16,
    [(4, 1, 1)],
    [(4, 1, 1)] * 16,
    [(0, 40, 0)],
]


def step_of(parts: list[Part]) -> tuple[Batch, list]:
    entries, trees = [], []
    for row, (start, run_len, nodes) in enumerate(parts):
        request = make_request([1] * (start + run_len), request_id=row)
        request.row = row
        entries.append(
            Scheduled(
                request=request,
                start=start,
                run_len=run_len,
                draft_slots=np.arange(1, nodes + 1, dtype=np.int32),
                states=ScheduledStates(
                    source=1, run_end=2, nodes=np.arange(3, nodes + 3, dtype=np.int32),
                    checkpoints={},
                ),
            )
        )  # fmt: skip
        trees.append(([1] * nodes, list(range(nodes))))
    return Batch(step=0, entries=entries), make_trees(trees)


def counts(variants: Variants) -> dict[str, int]:
    return {kernel: len(found) for kernel, found in variants.items()}


@pytest.mark.parametrize("save", [save_tiny_llama, save_tiny_hybrid])
def test_steps_of_any_size_run_the_kernels_of_the_first_ones(tmp_path, save) -> None:
    path = save(tmp_path / "model")
    engine = RolloutEngine.from_pretrained(path, spec="none", kv_bytes=1 << 24, max_running=300)
    rng = random.Random(0)
    with launched_variants() as variants:
        runner = engine.worker.target.runner
        runner._table._is_view = False
        for parts in FIRST_STEPS:
            runner.forward(*step_of(parts))
        first = counts(variants)
        for entries in (1, 2, 3, 16, 17, 130, 300):
            for most_nodes in (0, 5):
                parts = [
                    (
                        rng.randrange(90),
                        rng.choice([1, 1, 1, 16, 30]),
                        rng.randrange(most_nodes + 1),
                    )
                    for _ in range(entries)
                ]
                runner.forward(*step_of(parts))
    assert counts(variants) == first
    assert first["_attention_kernel"] == 4, "with splits and without, with nodes and without"
    assert all(count <= 2 for kernel, count in first.items() if kernel != "_attention_kernel")


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
    from rollout.ops.matmul.triton import tiled_matmul, tiles

    x, weights = torch.zeros(rows, 48), torch.zeros(7, 32, 48)
    groups = RowGroups.of(torch.zeros(rows, 3, dtype=torch.int32), 7)
    for tile in tiles(torch.float32):
        tiled_matmul(x, weights[0], None, tile)
        tiled_grouped_matmul(x, weights, groups, tile)
        tiled_grouped_matmul(x[:1].expand(rows * 3, -1), weights, groups, tile)


@pytest.mark.parametrize("run", [sampled, multiplied])
def test_any_number_of_rows_runs_the_same_kernels(run) -> None:
    with launched_variants() as variants:
        run(5)
        first = counts(variants)
        for rows in ROWS:
            run(rows)
    assert first
    assert counts(variants) == first
