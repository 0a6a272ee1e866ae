"""Replays under prices: added up by hand, and no length is known ahead of its time."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from bench_budget import barred_trace, best_by_median
from budget_replay import FIRST_LIMIT, PricedDrafter, first_nodes, pick_all, pick_by_worth, roofline
from harness.traces import load_trace, synthetic_trace, trace_of
from replaying import CorpusDrafter, replay

from ngram_native import Corpus


def test_the_best_fixed_number_is_best_by_its_median():
    seconds = {"none": [5, 5, 5], "fixed 2": [4, 4, 4], "fixed 8": [1, 6, 6], "budget": [1, 1, 1]}
    assert best_by_median(seconds, ["none", "fixed 2", "fixed 8"]) == "fixed 2"


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
    drafter = PricedDrafter(trace, pick_all)
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
    priced = PricedDrafter(trace, pick_all)
    result = replay(trace, priced, budget=5, active=16)
    expected = replay(trace, CorpusDrafter(), budget=5, active=16)
    assert (result.forwards_R == expected.forwards_R).all()
    assert (result.drafted_R == expected.drafted_R).all()
    assert priced.num_steps_without_drafts < priced.num_steps


def test_choosing_beats_both_plain_decoding_and_all_nodes():
    trace = synthetic_trace()

    def price(pick, nodes):
        drafter = PricedDrafter(trace, pick)
        replay(trace, drafter, budget=nodes, active=64)
        return drafter.price

    assert price(pick_by_worth, 16) < 0.9 * min(price(pick_all, 0), price(pick_all, 16))


def test_no_length_is_known_ahead_of_its_time():
    """A response's expected length never depends on those that end after it."""
    responses = [np.arange(length, dtype=np.int32) for length in (5, 9, 7, 90)]
    trace = trace_of("growing", [np.zeros(4)], responses, [0] * 4, [[0, 1], [2], [3]])
    expected = []

    def pick(proposal, running):
        expected.append(running.remaining_B.tolist())
        return pick_all(proposal, running)

    replay(trace, PricedDrafter(trace, pick), budget=0, active=2)
    first, second, third = expected[:9], expected[9:16], expected[16:]
    # Nothing ended yet: the whole limit. Then one of 5 tokens did, and the other has outlived it:
    # as many again as it has emitted.
    assert first[:5] == [[FIRST_LIMIT - n] * 2 for n in range(5)]
    assert first[5:] == [[float(n)] for n in range(5, 9)]
    # Responses of 5 and 9 tokens ended: what they are longer by on average.
    assert second == [[7.0], [6.0], [5.0], [4.0], [3.0], [4.0], [3.0]]
    # Past the longest so far, of 9 tokens, there is no room left.
    assert third[9:] == [[1.0]] * 81


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
