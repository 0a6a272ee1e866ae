"""Chains of the corpus's trees, and what the target made of them.

Legend: B rows of a call, K tokens of a chain at most, N tokens of all chains.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ngram_native import Proposal
from rollout.ops.ragged import offsets_of
from spec_workers.vllm.chain_budget import JudgedTokens

_NONE = -1  # token of a place behind a chain's end
NOTHING_JUDGED = JudgedTokens(
    probs_N=np.zeros(0, np.float32),
    depths_N=np.zeros(0, np.int64),
    accepted_N=np.zeros(0, np.bool_),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """One chain for each row that drafts, flat."""

    offsets_B1: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    probs_N: NDArray[np.float32]
    depths_N: NDArray[np.int64]  # 1: the first of its chain
    nodes_N: NDArray[np.int64]  # the node of its tree, from 0: the best are first


def best_chains(proposal: Proposal, limits_B: NDArray[np.int64]) -> Chains:
    """The most probable path of each tree, of at most so many tokens."""
    ends = proposal.offsets_B1.tolist()
    parents = proposal.parents_N.tolist()
    nodes: list[int] = []
    sizes: list[int] = []
    for b, limit in enumerate(limits_B.tolist()):
        begin, end, last, size = ends[b], ends[b + 1], 0, 0
        for node in range(begin, end):
            if size == limit:
                break
            if parents[node] == last:  # children come best first
                nodes.append(node)
                last = node - begin + 1
                size += 1
        sizes.append(size)
    nodes_N, sizes_B = np.array(nodes, dtype=np.int64), np.array(sizes, dtype=np.int64)
    return Chains(
        offsets_B1=offsets_of(sizes_B),
        tokens_N=proposal.tokens_N[nodes_N],
        probs_N=proposal.probabilities_N[nodes_N],
        depths_N=proposal.depths_N[nodes_N].astype(np.int64),
        nodes_N=nodes_N - np.repeat(proposal.offsets_B1[:-1], sizes_B),
    )


class ProposedChains:
    """The tokens handed to vLLM in one call, to be compared with what the next one brings."""

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self.tokens_BK = np.full((num_rows, max_tokens), _NONE, dtype=np.int32)
        self.sizes_B = np.zeros(num_rows, dtype=np.int64)
        self.verified_B = np.zeros(num_rows, dtype=np.int32)
        """First nodes of each tree that are verified: those of the chain before it leaves one out.
        Of deeper ones the corpus must not conclude that they were wrong."""
        self._probs_BK = np.zeros((num_rows, max_tokens), dtype=np.float32)

    def put(
        self, rows_B: NDArray[np.int64], chains: Chains, counts_B: NDArray[np.int64]
    ) -> list[list[int]]:
        """Keep the first ``counts_B`` tokens of these rows' chains; the drafts of all rows."""
        depth_N, sizes_B = chains.depths_N - 1, np.diff(chains.offsets_B1)
        row_N = np.repeat(rows_B, sizes_B)
        kept_N = depth_N < np.repeat(counts_B, sizes_B)
        row_N, depth_N = row_N[kept_N], depth_N[kept_N]
        self.tokens_BK[row_N, depth_N] = chains.tokens_N[kept_N]
        self._probs_BK[row_N, depth_N] = chains.probs_N[kept_N]
        self.sizes_B[rows_B] = counts_B
        first_N = chains.nodes_N[kept_N] == depth_N
        np.add.at(self.verified_B, row_N[first_N], 1)
        tokens_BK, sizes = self.tokens_BK.tolist(), self.sizes_B.tolist()
        return [tokens[:size] for tokens, size in zip(tokens_BK, sizes, strict=True)]

    def judge(
        self, sampled_BK: NDArray[np.int32], counts_B: NDArray[np.int64], rows_B: NDArray[np.bool_]
    ) -> tuple[JudgedTokens, int]:
        """The tokens that the target has decided of, and how many it accepted.

        Chains that vLLM did not verify after all are decided as far as its tokens tell.

        Args:
            sampled_BK: the first K new tokens of each row; anything behind them.
            counts_B: new tokens of each row.
            rows_B: rows to be judged; others hold another request now, or sampled nothing.
        """
        size = rows_B.size
        tokens_BK = self.tokens_BK[:size]
        depth_K = np.arange(tokens_BK.shape[1])
        came_BK = depth_K < counts_B[:, None]
        accepted_BK = np.logical_and.accumulate((tokens_BK == sampled_BK) & came_BK, axis=1)
        above_BK = np.ones_like(accepted_BK)
        above_BK[:, 1:] = accepted_BK[:, :-1]
        decided_BK = (tokens_BK != _NONE) & (came_BK | ~above_BK) & rows_B[:, None]
        accepted_BK &= decided_BK
        # Of a chain that was verified to its end one token more came than was accepted.
        num_accepted = int(np.minimum(accepted_BK.sum(axis=1), np.maximum(counts_B - 1, 0)).sum())
        judged = JudgedTokens(
            probs_N=self._probs_BK[:size][decided_BK],
            depths_N=np.broadcast_to(depth_K + 1, tokens_BK.shape)[decided_BK],
            accepted_N=accepted_BK[decided_BK],
        )
        return judged, num_accepted
