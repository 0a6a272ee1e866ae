"""One draft tree from two: the union of the corpus's and a neural draft's, by token path.

Legend: B entries; G nodes of the n-gram trees, D of the neural ones, N of both, U roots and N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of
from rollout.types import DraftTrees
from spec_workers.draft_tree import first_nodes, indices_within

_DOUBT = 0.02
"""The least doubt of a tree, however sure it is. It bounds its say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTrees:
    """The merged trees, and what became of the n-gram ones' nodes."""

    trees: DraftTrees
    index_G: NDArray[np.int64]  # each n-gram node's index among its entry's nodes; -1: left out


@dataclass(slots=True)
class _Union:
    """Nodes by number: the roots, [0, B), then the n-gram trees' and the neural ones'.

    A parent is one of these numbers. A neural node that an n-gram tree has too is that node, and
    its own number is nobody's parent. ``ngram_U`` and ``neural_U`` are the probabilities given that
    the parent is accepted; 0 where that tree has no such node.
    """

    entries_N: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    depths_N: NDArray[np.int32]
    sources_N: NDArray[np.uint8]
    parents_U: NDArray[np.int64]
    ngram_U: NDArray[np.float64]
    neural_U: NDArray[np.float64]
    doubles: NDArray[np.int64]  # numbers of neural nodes that an n-gram tree has too


def merge_trees(
    ngram: DraftTrees,
    neural: DraftTrees,
    *,
    limits_B: NDArray[np.int64],
    floor: float,
    num_sources: tuple[int, int],
) -> MergedTrees:
    """Each entry's most probable nodes of both trees, at most ``limits_B``, none below ``floor``.

    A node's probability given its parent is a mixture of what both trees say there. How much each
    has to say grows with how sure it is, so a confident n-gram overrules an undecided draft, and a
    tree that ends has nothing to say: the children of a node stay a (sub-)distribution.

    Args:
        ngram, neural: each entry's most probable nodes first.
        limits_B: most nodes per entry, at most 63.
        num_sources: of the n-gram trees, S, and of the neural ones, T. In the result the values of
            the former stay, the latter's follow as S + t, and S + T + t are nodes of both.
    """
    if not ngram.num_nodes:
        own = replace(neural, sources_N=neural.sources_N + np.uint8(num_sources[0]))
        return MergedTrees(trees=_likely(own, limits_B, floor), index_G=np.zeros(0, dtype=np.int64))
    union = _united(ngram, neural, num_sources)
    num_entries, entries_N = limits_B.size, union.entries_N
    ancestors = _ancestors(union.parents_U, int(union.depths_N.max()))
    probs_U = _mixed(union)
    probs_U[:num_entries] = 1.0
    for above_U in ancestors:
        probs_U = probs_U * probs_U[above_U]
    for above_U in ancestors:  # rounding makes no node more probable than its parent
        probs_U = np.minimum(probs_U, probs_U[above_U])
    probs_U[union.doubles] = -1.0
    probs_N = probs_U[num_entries:]

    order_N = np.lexsort((union.depths_N, -probs_N, entries_N))
    sizes_B = np.bincount(entries_N, minlength=num_entries)
    rank_N = indices_within(sizes_B)  # in its entry, of the nodes in that order
    is_chosen_N = (rank_N < np.repeat(limits_B, sizes_B)) & (probs_N[order_N] >= floor)
    chosen = order_N[is_chosen_N]
    numbers_U = np.zeros(probs_U.size, dtype=np.int64)  # in its tree; the root has 0
    numbers_U[num_entries + order_N] = rank_N + 1
    masks_U = np.left_shift(np.uint64(1), np.minimum(numbers_U, 63).astype(np.uint64))
    for above_U in ancestors:
        masks_U = masks_U | masks_U[above_U]
    trees = DraftTrees(
        offsets_B1=offsets_of(np.bincount(entries_N[chosen], minlength=num_entries)),
        tokens_N=union.tokens_N[chosen],
        parents_N=numbers_U[union.parents_U[num_entries + chosen]].astype(np.int32),
        depths_N=union.depths_N[chosen],
        masks_N=masks_U[num_entries + chosen] | np.uint64(1),
        probs_N=probs_N[chosen].astype(np.float32),
        sources_N=union.sources_N[chosen],
    )
    index_N = np.full(order_N.size, -1, dtype=np.int64)
    index_N[chosen] = rank_N[is_chosen_N]
    return MergedTrees(trees=trees, index_G=index_N[: ngram.num_nodes])


def _likely(trees: DraftTrees, limits_B: NDArray[np.int64], floor: float) -> DraftTrees:
    """The nodes that remain where the n-gram trees are empty."""
    sizes_B = np.diff(trees.offsets_B1)
    entries_N = np.repeat(np.arange(sizes_B.size), sizes_B)
    likely_B = np.bincount(entries_N[trees.probs_N >= floor], minlength=sizes_B.size)
    counts_B = np.minimum(likely_B, limits_B)
    return trees if (counts_B == sizes_B).all() else first_nodes(trees, counts_B)[0]


def _united(ngram: DraftTrees, neural: DraftTrees, num_sources: tuple[int, int]) -> _Union:
    """Every node of both, those of equal token paths once."""
    num_entries, num_ngram = ngram.offsets_B1.size - 1, ngram.num_nodes
    size, first_D = num_entries + num_ngram + neural.num_nodes, num_entries + num_ngram
    counts = np.concatenate((np.diff(ngram.offsets_B1), np.diff(neural.offsets_B1)))
    firsts = (num_entries + ngram.offsets_B1[:-1], first_D + neural.offsets_B1[:-1])
    entries_N = np.repeat(np.arange(counts.size) % num_entries, counts)
    parents_N = np.concatenate((ngram.parents_N, neural.parents_N))
    before_N = np.repeat(np.concatenate(firsts), counts) + parents_N - 1
    parents_N = np.where(parents_N == 0, entries_N, before_N)
    tokens_N = np.concatenate((ngram.tokens_N, neural.tokens_N))

    probs_U = np.concatenate((np.ones(num_entries), ngram.probs_N, neural.probs_N))
    given_N = probs_U[num_entries:] / np.maximum(probs_U[parents_N], np.finfo(float).tiny)
    np.minimum(given_N, 1.0, out=given_N)

    numbers_U = np.arange(size)  # of a node that both have, the n-gram tree's
    vocab = 1 + int(tokens_N.max())
    keys_G = parents_N[:num_ngram] * vocab + tokens_N[:num_ngram]
    sorted_G = np.argsort(keys_G)
    sorted_keys = np.append(keys_G[sorted_G], -1)  # which no key is
    for depth in range(1, int(neural.depths_N.max(initial=0)) + 1):
        nodes = np.flatnonzero(neural.depths_N == depth) + num_ngram
        keys = numbers_U[parents_N[nodes]] * vocab + tokens_N[nodes]
        found = np.searchsorted(sorted_keys[:-1], keys)
        is_double = sorted_keys[found] == keys
        if not is_double.any():
            break  # nor has any below it a parent that both have
        numbers_U[num_entries + nodes[is_double]] = num_entries + sorted_G[found[is_double]]
    doubles = first_D + np.flatnonzero(numbers_U[first_D:] < first_D)

    ngram_U, neural_U = np.zeros((2, size))
    ngram_U[num_entries:first_D] = given_N[:num_ngram]
    neural_U[numbers_U[first_D:]] = given_N[num_ngram:]
    sources_N = np.concatenate((ngram.sources_N, neural.sources_N + np.uint8(num_sources[0])))
    sources_N[numbers_U[doubles] - num_entries] = sources_N[doubles - num_entries] + np.uint8(
        num_sources[1]
    )
    return _Union(
        entries_N=entries_N,
        tokens_N=tokens_N,
        depths_N=np.concatenate((ngram.depths_N, neural.depths_N)),
        sources_N=sources_N,
        parents_U=np.concatenate((numbers_U[:num_entries], numbers_U[parents_N])),
        ngram_U=ngram_U,
        neural_U=neural_U,
        doubles=doubles,
    )


def _mixed(union: _Union) -> NDArray[np.float64]:
    """The probability of each node of the union given its parent; of a root, 0.

    A tree's say about the children of a node is the probability mass that it lists there, divided
    by its doubt about the likeliest of them.
    """
    size = union.parents_U.size
    parents = np.concatenate((union.parents_U, union.parents_U + size))
    given = np.concatenate((union.ngram_U, union.neural_U))
    mass = np.bincount(parents, given, given.size)
    given /= np.maximum(mass, 1.0)[parents]
    likeliest = np.zeros(given.size)
    np.maximum.at(likeliest, parents, given)
    say = (np.minimum(mass, 1.0) / (1.0 + _DOUBT - likeliest))[parents]
    ngram_say, neural_say = say[:size], say[size:]
    both_U = ngram_say * given[:size] + neural_say * given[size:]
    return np.minimum(both_U / np.maximum(ngram_say + neural_say, np.finfo(float).tiny), 1.0)


def _ancestors(parents_U: NDArray[np.int64], depth: int) -> Sequence[NDArray[np.int64]]:
    """Each node's ancestor 1, 2, 4, ... levels up, as often as a path of this depth needs to be
    folded into its end. A root is its own."""
    found, reach = [], 1
    above_U = parents_U
    while reach < depth:
        found.append(above_U)
        above_U, reach = above_U[above_U], 2 * reach
    return found
