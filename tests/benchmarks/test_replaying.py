"""The replay driver against scripted drafters and a brute-force walk."""

from __future__ import annotations

import numpy as np
import pytest
from harness.traces import trace_of
from replaying import Drafts, equal_counts, largest_gap, match_tree, replay


def make_trace(responses, *, steps=None, epochs=None):
    count = len(responses)
    trace = trace_of(
        "made",
        [np.array([90 + p]) for p in range(count)],
        [np.array(tokens) for tokens in responses],
        range(count),
        steps or [list(range(count))],
    )
    trace.epoch_of_R = np.array(epochs or [0] * count, np.int64)
    return trace


class Scripted:
    """Drafts what `tree(sequence_id, tokens so far)` says, and writes down what it is told."""

    name = "scripted"

    def __init__(self, tree):
        self.tree = tree
        self.seen = {}
        self.open_ids = set()
        self.max_open = 0
        self.versions = []

    def set_weight_version(self, version):
        assert not self.open_ids
        self.versions.append(version)

    def open(self, sequence_id, group, prompt):
        assert sequence_id not in self.seen
        self.open_ids.add(sequence_id)
        self.max_open = max(self.max_open, len(self.open_ids))
        self.seen[sequence_id] = []

    def propose(self, sequence_ids_B, budget):
        assert set(sequence_ids_B.tolist()) <= self.open_ids
        trees = [self.tree(i, self.seen[i]) for i in sequence_ids_B.tolist()]
        nodes = [node for tree in trees for node in tree]
        return Drafts(
            offsets_B1=np.cumsum([0, *map(len, trees)]),
            tokens_N=np.array([node[0] for node in nodes], np.int32),
            parents_N=np.array([node[1] for node in nodes], np.int32),
            probabilities_N=np.array([node[2] for node in nodes], np.float32),
        )

    def insert(self, sequence_ids_B, tokens_N, offsets_B1):
        assert (np.diff(offsets_B1) >= 1).all()
        for b, sequence_id in enumerate(sequence_ids_B.tolist()):
            self.seen[sequence_id] += tokens_N[offsets_B1[b] : offsets_B1[b + 1]].tolist()

    def close(self, sequence_id):
        self.open_ids.remove(sequence_id)


def test_oracle_of_three_tokens_emits_four():
    responses = [list(range(i, i + 8 + 4 * i)) for i in range(5)]

    def tree(sequence_id, so_far):
        coming = responses[sequence_id][len(so_far) : len(so_far) + 3]
        return [(token, j, 0.9) for j, token in enumerate(coming)]

    drafter = Scripted(tree)
    trace = make_trace(
        responses,
        steps=[[1, 0, 2], [3, 4]],
        epochs=[0, 0, 0, 1, 1],
    )
    result = replay(trace, drafter, budget=3, active=2)
    assert drafter.seen == dict(enumerate(responses))  # every token once
    assert drafter.max_open == 2
    assert drafter.versions == [0, 1]
    assert not drafter.open_ids
    assert result.forwards_R.tolist() == [2, 3, 4, 5, 6]
    assert result.emitted_R.tolist() == [8, 12, 16, 20, 24]
    assert result.accept_length == 4
    assert result.accept_length_by(trace.epoch_of_R) == {0: 4, 1: 4}


def test_drafting_nothing_emits_one():
    result = replay(make_trace([[1, 2, 3], [4]]), Scripted(lambda *_: []), budget=8, active=64)
    assert result.accept_length == 1
    assert result.drafted == 0
    assert len(result.estimates_J) == 0


def test_accepted_counts_are_by_response():
    # Right about every second token of response 0 and wrong about response 1.
    def tree(sequence_id, so_far):
        return [(7, 0, 0.25), (8, 0, 0.5)] if sequence_id == 0 else [(1, 0, 0.125)]

    result = replay(make_trace([[8, 9, 8, 9], [2, 2]]), Scripted(tree), budget=2, active=2)
    assert result.forwards_R.tolist() == [2, 2]
    assert result.drafted_R.tolist() == [4, 2]
    assert sorted(zip(result.estimates_J.tolist(), result.accepted_J.tolist(), strict=True)) == [
        *[(0.125, False)] * 2,
        *[(0.25, False)] * 2,
        *[(0.5, True)] * 2,
    ]


def test_nodes_beyond_the_recording_are_not_judged():
    # The path 5, 6 agrees to the end; what follows was never sampled. A wrong path stays wrong.
    nodes = [(5, 0, 0.9), (6, 1, 0.8), (7, 2, 0.7), (8, 3, 0.6), (1, 0, 0.1)]
    nodes.append((2, 5, 0.05))
    result = replay(make_trace([[5, 6]]), Scripted(lambda *_: nodes), budget=8, active=1)
    assert result.drafted_R.tolist() == [6]
    assert result.emitted_R.tolist() == [2]
    np.testing.assert_allclose(result.estimates_J, [0.9, 0.8, 0.1, 0.05], rtol=1e-6)
    assert result.accepted_J.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ([(1, 0, 1.0)] * 3, "at most 2"),
        ([(1, 1, 1.0)], "before their children"),
        ([(1, -1, 1.0)], "before their children"),
    ],
)
def test_broken_trees_are_refused(tree, reason):
    with pytest.raises(ValueError, match=reason):
        replay(make_trace([[1, 2]]), Scripted(lambda *_: tree), budget=2, active=1)


def test_the_longest_match_agrees_with_trying_all_paths():
    rng = np.random.default_rng(0)
    for _ in range(500):
        size, begin = int(rng.integers(0, 12)), int(rng.integers(0, 3))
        # Few tokens, so that siblings repeat one another; nodes of other entries around.
        tokens = rng.integers(0, 2, begin + size + 2).tolist()
        parents = [0] * begin + [int(rng.integers(0, j + 1)) for j in range(size)] + [0, 0]
        to_come = rng.integers(0, 2, int(rng.integers(1, 9))).tolist()
        at = int(rng.integers(0, len(to_come)))
        best = 0
        for node in range(1, size + 1):
            spelled = []
            above = node
            while above:
                spelled.insert(0, tokens[begin + above - 1])
                above = parents[begin + above - 1]
            if to_come[at : at + len(spelled)] == spelled:
                best = max(best, len(spelled))
        matched = match_tree(tokens, parents, begin, begin + size, to_come, at)
        assert len(matched) == size + 1
        assert max(matched) == best


def test_a_bin_that_is_off_is_found():
    estimates_J = np.linspace(0, 1, 10_000, dtype=np.float32)
    accepted_J = np.random.default_rng(0).random(10_000) < estimates_J
    bins = equal_counts(estimates_J)
    assert np.bincount(bins).tolist() == [1000] * 10
    assert largest_gap(bins, estimates_J, accepted_J) < 0.05
    accepted_J[2000:3000] = True  # where 0.25 is estimated
    assert abs(largest_gap(bins, estimates_J, accepted_J) - 0.75) < 0.01


def test_equal_estimates_fall_into_bins_of_equal_counts():
    assert np.bincount(equal_counts(np.full(1000, 0.5, np.float32))).tolist() == [100] * 10


def test_nothing_judged_is_off_by_nothing():
    nothing = np.empty(0, np.float32)
    assert largest_gap(equal_counts(nothing), nothing, np.empty(0, np.bool_)) == 0
