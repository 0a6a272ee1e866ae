"""The guesses of a draft behind each node, and how often they come true.

The target's sample at a position is its inverse distribution function at a uniform number that
depends on the request's seed and the position alone (`rollout/ops/uniforms`). The draft looks that
number up: a token whose interval of the draft's distribution function is near it is more likely to
be the target's than its probability says (common random numbers; Daliri et al. 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").

Legend: G trees, L levels, R rows of logits, D draft vocabulary, W children.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.draft_guesses import GuessInputs, draft_guesses
from rollout.ops.uniforms import uniforms
from rollout.types import Batch, EntryResult, Request
from spec_workers.neural.proposal import Proposal

Tensors = dict[str, torch.Tensor]

_NEAR = 0.25  # to either side of the noise

_INERTIA = 20.0  # claimed acceptances that the first ratio of 1 counts for
_MEMORY = 400.0  # claimed acceptances that are remembered


def noise_inputs(
    requests: Sequence[Request], ends_G: NDArray[np.int64], padding: int, num_levels: int
) -> dict[str, NDArray]:
    """The inputs of `Guesser.children` that depend on the requests, of trees and padding.

    Args:
        ends_G: tokens of the sequences.
        num_levels: positions from there on that are guessed.
    """
    count = len(requests)
    seeds_G = np.array([request.seed for request in requests], dtype=np.uint64).view(np.int64)
    positions_GL = ends_G[:, None] + np.arange(num_levels)
    found_T = uniforms(
        torch.from_numpy(np.repeat(seeds_G, num_levels)), torch.from_numpy(positions_GL.reshape(-1))
    )
    uniforms_PL = np.zeros((count + padding, num_levels), dtype=np.float32)
    uniforms_PL[:count] = found_T.numpy().reshape(positions_GL.shape)
    temperature_P, near_P = np.ones((2, count + padding), dtype=np.float32)
    for g, request in enumerate(requests):
        if request.params.temperature:  # greedy requests have no noise: all is near
            temperature_P[g], near_P[g] = request.params.temperature, _NEAR
    return {"uniforms": uniforms_PL, "temperature": temperature_P, "near": near_P}


class Guesser:
    """Turns logits into children and their probabilities, on the CPU or a device."""

    def __init__(self, topk: int, num_levels: int, token_ids_D: torch.Tensor | None) -> None:
        """
        Args:
            topk: most children of a node.
            num_levels: of a tree.
            token_ids_D: the target's token of each of the draft's; None: the same.
        """
        self._topk = topk
        self._token_ids_D = token_ids_D
        self._claimed_L = np.zeros(num_levels)
        self._accepted_L = np.zeros(num_levels)
        self._open: Proposal | None = None

    def ratios(self) -> NDArray[np.float32]:
        """[L]: accepted over claimed guesses of each level, 0 for children of roots."""
        ratios_L = (self._accepted_L + _INERTIA) / (self._claimed_L + _INERTIA)
        return ratios_L.astype(np.float32)

    def children(
        self,
        logits_RD: torch.Tensor,
        inputs: Tensors,
        trees_R: torch.Tensor,
        level: int | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`draft_guesses` of these rows. ``inputs``: `noise_inputs` and ``ratios``."""
        own = GuessInputs(
            temperature_P=inputs["temperature"],
            near_P=inputs["near"],
            uniforms_PL=inputs["uniforms"],
            ratios_L=inputs["ratios"],
        )
        return draft_guesses(logits_RD, own, trees_R, level, self._token_ids_D, self._topk)

    def remember(self, proposal: Proposal) -> None:
        """Keep a proposal until its step's tokens are known."""
        self._open = proposal

    def learn(self, batch: Batch, results: list[EntryResult]) -> None:
        """Learn from a step's emitted tokens, along their path as far as there were guesses."""
        proposal, self._open = self._open, None
        if proposal is None or proposal.batch is not batch:
            return
        ratios_L = self.ratios().astype(np.float64)
        for level, claimed, came_true in proposal.followed(results):
            self._claimed_L[level] += claimed / ratios_L[level]
            self._accepted_L[level] += came_true
        kept_L = np.where(self._claimed_L > _MEMORY, 0.5, 1.0)
        self._claimed_L *= kept_L
        self._accepted_L *= kept_L
