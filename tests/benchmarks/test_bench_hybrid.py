"""What bench_hybrid says of states and of accept lengths holds for small runs too."""

from __future__ import annotations

import numpy as np
from hybrid_bench.accept_length import accept_rows
from hybrid_bench.state_memory import state_memory_rows
from hybrid_bench.verify_cost import PARENTS, tree
from traces import Trace

from tests.helpers.tree_checks import check_trees


def test_a_request_holds_one_state_and_scratch_for_its_tree(tmp_path) -> None:
    rows = {row.name: row for row in state_memory_rows(tmp_path)}
    assert all(row.ok for row in rows.values())
    assert rows["held by a request between steps"].value == 1.0
    assert rows["held in the largest step"].value > 2 * 16, "trees had scratch"


def test_the_corpus_drafts_alike_for_hybrid_and_dense(tmp_path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 9).astype(np.int32) for _ in range(2)]
    trace = Trace(
        name="small",
        prompts=prompts,
        responses=[np.tile(prompts[r % 2], 3)[: 12 + r].copy() for r in range(8)],
        prompt_of_R=np.arange(8) % 2,
        epoch_of_R=np.arange(8) // 4,
        temperature_of_R=np.full(8, np.nan),
        steps=[[0, 1, 2, 3], [4, 5, 6, 7]],
    )
    dense, hybrid, ratio = accept_rows(tmp_path, trace, None)
    assert hybrid.value == dense.value > 1.5
    assert ratio.ok


def test_the_tree_that_is_timed_is_one() -> None:
    trees = tree(PARENTS[8])
    check_trees(trees)
    assert trees.num_nodes == 7
    assert len(set(trees.parents_N.tolist())) < 7, "it branches"
