"""One draft tree from two: the union of the corpus's and a neural draft's, by token path.

Legend: B entries; G nodes of the n-gram trees, D of the neural ones, U of their union, roots first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types import DraftTrees

_DOUBT = 0.02
"""The least there is of it: so sure forecasters have a say of at most the inverse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTrees:
    """The merged trees, and what became of the n-gram ones' nodes."""

    trees: DraftTrees
    index_G: NDArray[np.int64]  # of each n-gram node among its entry's nodes; -1: it was left out


@dataclass(slots=True)
class _Union:
    """Nodes by number: the roots, [0, B), the n-gram trees' [B, B + G), then what else there is.

    A parent is one of these numbers. ``ngram_U`` and ``neural_U`` are the probabilities given that
    the parent is accepted; 0 where that tree has no such node.
    """

    entries_U: NDArray[np.int64]
    parents_U: NDArray[np.int64]
    tokens_U: NDArray[np.int32]
    depths_U: NDArray[np.int64]
    sources_U: NDArray[np.uint8]
    ngram_U: NDArray[np.float64]
    neural_U: NDArray[np.float64]


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
        limits_B: most nodes per entry, at most 63.
        num_sources: of the n-gram trees, S, and of the neural ones, T. In the result the values of
            the former stay, the latter's follow as S + t, and S + T + t are nodes of both.
    """
    union = _united(ngram, neural, num_sources)
    given_U = _mixed(union)
    levels = list(_levels(union.depths_U))
    probs_U = np.ones(union.depths_U.size)
    for nodes in levels[1:]:
        probs_U[nodes] = probs_U[union.parents_U[nodes]] * given_U[nodes]
    order_U = np.lexsort((union.depths_U, -probs_U, union.entries_U))
    num_entries = limits_B.size
    starts_B = np.searchsorted(union.entries_U[order_U], np.arange(num_entries))
    rank_U = np.empty_like(order_U)  # in its entry; the root, which nothing exceeds, has 0
    rank_U[order_U] = np.arange(order_U.size) - starts_B[union.entries_U[order_U]]
    is_chosen_U = (rank_U <= limits_B[union.entries_U]) & (probs_U >= floor) & (rank_U > 0)
    masks_U = np.left_shift(np.uint64(1), np.minimum(rank_U, 63).astype(np.uint64))
    for nodes in levels[1:]:
        masks_U[nodes] |= masks_U[union.parents_U[nodes]]
    chosen = order_U[is_chosen_U[order_U]]
    offsets_B1 = np.zeros(num_entries + 1, dtype=np.int64)
    np.cumsum(np.bincount(union.entries_U[chosen], minlength=num_entries), out=offsets_B1[1:])
    trees = DraftTrees(
        offsets_B1=offsets_B1,
        tokens_N=union.tokens_U[chosen],
        parents_N=rank_U[union.parents_U[chosen]].astype(np.int32),
        depths_N=union.depths_U[chosen].astype(np.int32),
        masks_N=masks_U[chosen],
        probs_N=probs_U[chosen].astype(np.float32),
        sources_N=union.sources_U[chosen],
    )
    own = slice(num_entries, num_entries + ngram.num_nodes)
    return MergedTrees(trees=trees, index_G=np.where(is_chosen_U[own], rank_U[own] - 1, -1))


def _united(ngram: DraftTrees, neural: DraftTrees, num_sources: tuple[int, int]) -> _Union:
    """Every node of both, those of equal token paths once."""
    num_entries = ngram.offsets_B1.size - 1
    entries_G, entries_D = _entries(ngram), _entries(neural)
    parents_G = _parents(ngram, entries_G, num_entries + np.arange(ngram.num_nodes))
    vocab = 1 + max(ngram.tokens_N.max(initial=0), neural.tokens_N.max(initial=0))
    keys_G = parents_G * vocab + ngram.tokens_N
    sorted_G = np.argsort(keys_G)
    sorted_keys = np.append(keys_G[sorted_G], -1)  # which no key is
    numbers_D = np.zeros(neural.num_nodes, dtype=np.int64)  # of each neural node in the union
    parents_D = numbers_D
    count = num_entries + ngram.num_nodes
    for nodes in _levels(neural.depths_N):
        parents_D = _parents(neural, entries_D, numbers_D)  # true down to this level
        keys = parents_D[nodes] * vocab + neural.tokens_N[nodes]
        found = np.searchsorted(sorted_keys[:-1], keys)
        is_new = sorted_keys[found] != keys
        numbers_D[nodes[~is_new]] = num_entries + sorted_G[found[~is_new]]
        numbers_D[nodes[is_new]] = np.arange(count, count + int(is_new.sum()))
        count += int(is_new.sum())
    roots = np.arange(num_entries)

    def joined(of_roots: NDArray, of_ngram: NDArray, of_neural: NDArray) -> NDArray:
        joined_U = np.zeros(count, dtype=of_ngram.dtype)
        joined_U[numbers_D] = of_neural
        joined_U[: num_entries + ngram.num_nodes] = np.concatenate((of_roots, of_ngram))
        return joined_U

    zeros_B = np.zeros(num_entries, dtype=np.int64)
    neural_U = np.zeros(count)
    neural_U[numbers_D] = _given_parent(neural)
    sources_U = joined(zeros_B, ngram.sources_N, num_sources[0] + neural.sources_N)
    shared_D = numbers_D < num_entries + ngram.num_nodes
    sources_U[numbers_D[shared_D]] = sum(num_sources) + neural.sources_N[shared_D]
    return _Union(
        entries_U=joined(roots, entries_G, entries_D),
        parents_U=joined(roots, parents_G, parents_D),
        tokens_U=joined(zeros_B, ngram.tokens_N, neural.tokens_N),
        depths_U=joined(zeros_B, ngram.depths_N.astype(np.int64), neural.depths_N),
        sources_U=sources_U,
        ngram_U=joined(zeros_B, _given_parent(ngram), np.zeros(neural.num_nodes)),
        neural_U=neural_U,
    )


def _mixed(union: _Union) -> NDArray[np.float64]:
    """The probability of each node of the union given its parent.

    What a tree says of a node's children counts by the mass it lists there, and the more the surer
    it is of one: divided by its doubt about the likeliest.
    """
    given: list[NDArray] = []
    say: list[NDArray] = []
    for given_U in (union.ngram_U, union.neural_U):
        mass_U = np.bincount(union.parents_U, given_U, union.parents_U.size)
        given_U = given_U / np.maximum(mass_U, 1.0)[union.parents_U]
        likeliest_U = np.zeros_like(mass_U)
        np.maximum.at(likeliest_U, union.parents_U, given_U)
        given.append(given_U)
        say.append((np.minimum(mass_U, 1.0) / (1.0 - likeliest_U + _DOUBT))[union.parents_U])
    ngram_U, neural_U = given
    # Roots are their own parents, and have no probability to mix.
    share_U = say[0] / np.maximum(say[0] + say[1], np.finfo(float).tiny)
    return np.minimum(share_U * ngram_U + (1.0 - share_U) * neural_U, 1.0)


def _given_parent(trees: DraftTrees) -> NDArray[np.float64]:
    """Path probabilities as probabilities given the parent."""
    probs_N = trees.probs_N.astype(np.float64)
    of_parents_N = np.ones_like(probs_N)
    below = np.flatnonzero(trees.parents_N)
    first_N = trees.offsets_B1[_entries(trees)]
    of_parents_N[below] = probs_N[first_N[below] + trees.parents_N[below] - 1]
    return np.minimum(probs_N / np.maximum(of_parents_N, np.finfo(float).tiny), 1.0)


def _entries(trees: DraftTrees) -> NDArray[np.int64]:
    return np.repeat(np.arange(trees.offsets_B1.size - 1), np.diff(trees.offsets_B1))


def _parents(trees: DraftTrees, entries_N: NDArray, numbers_N: NDArray) -> NDArray[np.int64]:
    """Each node's parent by its number; a root is numbered by its entry."""
    before_N = trees.offsets_B1[entries_N] + trees.parents_N - 1
    # Where the parent is the root, ``before_N`` is another entry's node or none: not looked at.
    return np.where(trees.parents_N == 0, entries_N, numbers_N[np.maximum(before_N, 0)])


def _levels(depths_N: NDArray) -> Iterator[NDArray[np.intp]]:
    """The nodes of each depth, the least first."""
    order_N = np.argsort(depths_N, kind="stable")
    yield from np.split(order_N, np.flatnonzero(np.diff(depths_N[order_N])) + 1)
