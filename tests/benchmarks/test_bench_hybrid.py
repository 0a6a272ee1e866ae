"""Figures of states and of accept lengths hold for small runs too."""

from __future__ import annotations

import numpy as np
from bench_hybrid import PARENTS, accept_rows, state_rows
from decoding import draft_trees
from harness.traces import trace_of

from tests.helpers.tree_checks import check_trees


def test_a_request_holds_one_state_and_scratch_for_its_tree(tmp_path) -> None:
    rows = {row.name: row for row in state_rows(tmp_path)}
    assert all(row.ok for row in rows.values())
    assert rows["held by a request between steps"].value == 1.0
    assert rows["held in the largest step"].value > 2 * 16, "trees had scratch"


def test_the_corpus_drafts_alike_for_hybrid_and_dense(tmp_path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 9).astype(np.int32) for _ in range(2)]
    responses = [np.tile(prompts[r % 2], 3)[: 12 + r] for r in range(8)]
    trace = trace_of("small", prompts, responses, np.arange(8) % 2, [[0, 1, 2, 3], [4, 5, 6, 7]])
    dense, hybrid, ratio = accept_rows(tmp_path, trace, None)
    assert hybrid.value == dense.value > 1.5
    assert ratio.ok


def test_the_tree_that_is_timed_is_one() -> None:
    trees = draft_trees([PARENTS], np.arange(7, dtype=np.int32))
    check_trees(trees)
    assert trees.num_nodes == 7
    assert len(set(trees.parents_N.tolist())) < 7, "it branches"
