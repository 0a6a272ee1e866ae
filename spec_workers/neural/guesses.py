"""The guesses of a draft behind each node, and what it learns from how they turned out.

Legend: R rows of logits, D draft vocabulary, C candidates, W children, K components.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.typing import NDArray

from rollout.ops.transfers import download
from rollout.types import Batch, EntryResult
from spec_workers.neural.arrays import Array, Arrays
from spec_workers.neural.mixture import (
    LearnedMixture,
    Reliability,
    Tables,
    contexts,
    corrected,
    depth_bucket,
    mixed,
)
from spec_workers.neural.proposal import Proposal
from spec_workers.neural.shared_noise import (
    CANDIDATES,
    Candidates,
    Tensors,
    component_probabilities,
    component_tables,
    drawn_from,
    likeliest,
)

_TABLES = ("weights", "ratios", "knots", "widths", "sharpness")


@dataclass(kw_only=True, slots=True)
class Guesses:
    """The children of rows, and the candidates they were chosen from."""

    tokens_RW: Array  # int64, of the target's vocabulary
    probs_RW: Array  # float32, the most probable first
    found: Candidates


class Guesser:
    """Turns logits into children and their probabilities, on the CPU or a device."""

    def __init__(self, topk: int, token_ids_D: torch.Tensor | None) -> None:
        """
        Args:
            topk: most children of a node.
            token_ids_D: the target's token of each of the draft's; None: the same.
        """
        self._topk = topk
        self._token_ids_D = token_ids_D
        self._host_ids_D = None if token_ids_D is None else download({"ids": token_ids_D})["ids"]
        self._mixture = LearnedMixture()
        self._reliability = Reliability()
        self._open: Proposal | None = None

    def tables(self) -> dict[str, NDArray]:
        """The learned tables that `children` reads."""
        return {
            "weights": self._mixture.weights(),
            **self._reliability.tables(),
            **component_tables(),
        }

    def children(
        self,
        arrays: Arrays,
        logits_RD: torch.Tensor,
        inputs: Tensors,
        trees_R: torch.Tensor,
        depth: int,
    ) -> Guesses:
        """The children of nodes of one depth, 0 for roots. Nothing waits for a device.

        Args:
            arrays: those that the guesses come as.
            logits_RD: overwritten where float32.
            inputs: what `noise_inputs` and `tables` gave, where the logits are.
            trees_R: int64, each row's tree.
        """
        uniforms_R = inputs["uniforms"][trees_R, depth]
        logits_RD = drawn_from(logits_RD, inputs, trees_R)
        index_RC, probs_RC, ends_RC = likeliest(logits_RD, uniforms_R, CANDIDATES)
        is_greedy_R = inputs["is_greedy"][trees_R] > 0 if "is_greedy" in inputs else None
        found = Candidates(
            index_RC=arrays.of_tensor(index_RC),
            probs_RC=arrays.of_tensor(probs_RC),
            ends_RC=arrays.of_tensor(ends_RC),
            uniforms_R=arrays.of_tensor(uniforms_R),
            is_greedy_R=None if is_greedy_R is None else arrays.of_tensor(is_greedy_R),
        )
        tables = {name: arrays.of_tensor(inputs[name]) for name in _TABLES}
        contexts_R, _, estimates_RC = _estimates(arrays, found, int(depth_bucket(depth)), tables)
        probs_RC = corrected(arrays, estimates_RC, contexts_R, tables)
        best_RW = arrays.descending(probs_RC)[:, : self._topk]
        rows_R1 = arrays.arange(len(best_RW))[:, None]
        tokens_RW = found.index_RC[rows_R1, best_RW]
        if self._token_ids_D is not None:
            tokens_RW = arrays.of_tensor(self._token_ids_D)[tokens_RW]
        return Guesses(tokens_RW=tokens_RW, probs_RW=probs_RC[rows_R1, best_RW], found=found)

    def remember(self, proposal: Proposal) -> None:
        """Keep a proposal until its step's tokens are known."""
        self._open = proposal

    def learn(self, batch: Batch, results: list[EntryResult]) -> None:
        """Learn from a step's emitted tokens, along their path as far as there were guesses."""
        proposal, self._open = self._open, None
        if proposal is None or proposal.batch is not batch:
            return
        cases = proposal.followed(results)
        if cases is None:
            return
        contexts_R, components_RCK, estimates_RC = _estimates(
            Arrays(), cases.found, depth_bucket(cases.depths_R), self.tables()
        )
        index_RC = cases.found.index_RC
        tokens_RC = index_RC if self._host_ids_D is None else self._host_ids_D[index_RC]
        came_true = tokens_RC == cases.came_R[:, None]
        # The same token may come twice, once with probability 0.
        came_true &= components_RCK.any(axis=2)
        self._mixture.learn(contexts_R, components_RCK, came_true)
        self._reliability.learn(contexts_R, estimates_RC, came_true)


def _estimates(
    arrays: Arrays, found: Candidates, bucket: int | Array, tables: Tables
) -> tuple[Array, Array, Array]:
    """Contexts [R], component probabilities [R, C, K - 1] and the mixture's estimates [R, C]."""
    components_RCK = component_probabilities(arrays, found, tables)
    contexts_R = contexts(found.is_greedy_R, bucket, arrays.alike.amax(found.probs_RC, 1))
    return contexts_R, components_RCK, mixed(components_RCK, contexts_R, tables["weights"])
