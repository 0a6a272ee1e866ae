"""Replays under prices, added up by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from bench_budget import barred_trace
from budget_replay import (
    PricedDrafter,
    first_nodes,
    pick_all,
    pick_by_worth,
    roofline,
)
from harness.traces import load_trace, synthetic_trace
from replaying import CorpusDrafter, replay

from ngram_native import Corpus


def test_a_trace_comes_with_its_bar():
    assert barred_trace("a=b/c.npz=2.5") == (Path("a=b/c.npz"), 2.5)
    assert barred_trace("c.npz") == (Path("c.npz"), None)
    with pytest.raises(argparse.ArgumentTypeError, match="least speedup"):
        barred_trace("c.npz=fast")


@pytest.mark.parametrize("content", [b"no", b"PK\x03\x04 torn"])
def test_a_file_that_is_no_trace_is_named(tmp_path, content):
    path = tmp_path / "no.npz"
    path.write_bytes(content)
    with pytest.raises(FileNotFoundError, match=r"no\.npz"):
        load_trace(path)


def test_the_roofline_bends_where_arithmetic_takes_over():
    np.testing.assert_allclose(roofline(np.array([1, 170, 340])), [1 + 0.15 / 170, 1.15, 2.3])


def test_plain_replay_is_priced_by_its_widths():
    trace = synthetic_trace()
    drafter = PricedDrafter(pick_all)
    replay(trace, drafter, budget=0, active=7)
    prices = []
    for step in trace.steps:
        waiting, running, price = [len(trace.responses[r]) for r in step], [], 0.0
        while waiting or running:
            while waiting and len(running) < 7:
                running.append(waiting.pop(0))
            price += float(roofline(np.array(len(running))))
            running = [left - 1 for left in running if left > 1]
        prices.append(price)
    np.testing.assert_allclose(drafter.price_of_step, prices)
    assert drafter.num_steps_without_drafts == drafter.num_steps


def test_all_nodes_picked_is_the_corpus_as_it_comes():
    trace = synthetic_trace()
    priced = PricedDrafter(pick_all)
    result = replay(trace, priced, budget=5, active=16)
    expected = replay(trace, CorpusDrafter(), budget=5, active=16)
    assert (result.forwards_R == expected.forwards_R).all()
    assert (result.drafted_R == expected.drafted_R).all()
    assert priced.num_steps_without_drafts < priced.num_steps


def test_choosing_beats_both_plain_decoding_and_all_nodes():
    trace = synthetic_trace()

    def price(pick, nodes):
        drafter = PricedDrafter(pick)
        replay(trace, drafter, budget=nodes, active=64)
        return drafter.price

    assert price(pick_by_worth, 16) < 0.9 * min(price(pick_all, 0), price(pick_all, 16))


def test_first_nodes_are_whole_trees():
    rng = np.random.default_rng(0)
    corpus = Corpus(max_bytes=1 << 20)
    for sequence in range(9):
        corpus.open(sequence, sequence % 2, rng.integers(0, 3, 80).astype(np.int32))
    budgets_B = rng.integers(0, 9, 9).astype(np.int32)
    proposal = corpus.propose(np.arange(9), budgets_B, 0.0)
    counts_B = rng.integers(0, np.diff(proposal.offsets_B1) + 1)
    assert 0 < counts_B.sum() < len(proposal.tokens_N)
    drafts = first_nodes(proposal, counts_B)
    assert np.diff(drafts.offsets_B1).tolist() == counts_B.tolist()
    for b, count in enumerate(counts_B):
        begin, at = proposal.offsets_B1[b], drafts.offsets_B1[b]
        for mine, theirs in (
            (drafts.tokens_N, proposal.tokens_N),
            (drafts.parents_N, proposal.parents_N),
        ):
            assert mine[at : at + count].tolist() == theirs[begin : begin + count].tolist()
