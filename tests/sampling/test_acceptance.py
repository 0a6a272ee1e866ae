import itertools

import numpy as np

from rollout.ops.tree_accept.reference import walk


def slow_walk(draft_tokens, parents, sampled):
    path, node = [], 0
    while True:
        children = [
            c
            for c, parent in enumerate(parents, start=1)
            if parent == node and draft_tokens[c - 1] == sampled[node]
        ]
        if not children:
            return path
        node = children[0]
        path.append(node)


def test_no_draft_emits_the_targets_token():
    assert walk([], [], [5]) == []


def test_walk_follows_the_child_that_equals_the_sample():
    #        root -> a(1), b(2); b -> c(3); a -> d(4)
    tokens, parents = [10, 11, 12, 13], [0, 0, 2, 1]
    assert walk(tokens, parents, [11, 0, 12, 9, 0]) == [2, 3]
    assert walk(tokens, parents, [10, 13, 0, 0, 9]) == [1, 4]
    assert walk(tokens, parents, [99, 13, 12, 0, 9]) == []


def test_against_the_slow_walk_on_random_trees():
    rng = np.random.default_rng(0)
    lengths = set()
    for size in itertools.chain(range(12), [63] * 300):
        parents = [int(rng.integers(0, j + 1)) for j in range(size)]
        tokens = rng.integers(0, 3, size).tolist()
        sampled = rng.integers(0, 3, size + 1).tolist()
        path = walk(tokens, parents, sampled)
        assert path == slow_walk(tokens, parents, sampled)
        lengths.add(len(path))
    assert max(lengths) > 3
