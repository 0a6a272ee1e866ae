"""The guesses of a draft behind each node, and how often they come true.

The target's sample at a position is its inverse distribution function at a uniform number that
depends on the request's seed and the position alone (`rollout/ops/uniforms`). The draft looks that
number up: a token whose interval of the draft's distribution function is near it is more likely to
be the target's than its probability says (common random numbers; Daliri et al. 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").

Legend: G trees, L levels, R rows of logits, D draft vocabulary, C candidates, W children.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.uniforms.reference import noise
from rollout.types import Batch, EntryResult, Request
from spec_workers.neural.proposal import Proposal

Tensors = dict[str, torch.Tensor]

_CANDIDATES = 32  # of a row; the tokens beyond are hardly ever worth a node
_NEAR = 0.25  # to either side of the noise
_NEAR_SHARE = 0.25  # of a guess that counts the token's part of what is near

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
    seeds_G = np.array([request.seed for request in requests], dtype=np.uint64)
    positions_GL = ends_G[:, None] + np.arange(num_levels)
    uniforms_GL = noise(np.repeat(seeds_G, num_levels), positions_GL.reshape(-1))
    temperature_G = np.array([request.params.temperature for request in requests], dtype=np.float32)
    is_greedy_G = temperature_G == 0
    return {
        "uniforms": np.pad(
            uniforms_GL.reshape(positions_GL.shape).astype(np.float32), ((0, padding), (0, 0))
        ),
        "temperature": np.pad(np.where(is_greedy_G, np.float32(1), temperature_G),
                              (0, padding), constant_values=1),
        # Greedy requests have no noise: all of the distribution is near.
        "near": np.pad(np.where(is_greedy_G, np.float32(1), np.float32(_NEAR)),
                       (0, padding), constant_values=1),
    }  # fmt: skip


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
        """The children of nodes of a level, 0 for roots. Nothing waits for a device.

        Args:
            logits_RD: any float dtype.
            inputs: where the logits are: `noise_inputs` and ``ratios``.
            trees_R: int64, each row's tree.
            level: of all rows, or int64 [R].

        Returns:
            Tokens of the target's vocabulary, int64 [R, W], the most probable first.
            Their probabilities, float32 [R, W]; NaN where logits are.
        """
        temperature_R1 = inputs["temperature"][trees_R][:, None]
        probs_RD = torch.softmax(logits_RD.float() / temperature_R1, dim=1)
        # CUDA's scan of one row, unlike that of several, may round differently from call to call.
        is_alone = probs_RD.is_cuda and len(probs_RD) == 1
        rows_RD = probs_RD.expand(2, -1) if is_alone else probs_RD
        ends_RD = rows_RD.cumsum(dim=1)[: len(probs_RD)]
        probs_RC, index_RC = probs_RD.topk(min(_CANDIDATES, probs_RD.shape[1]), dim=1)
        ends_RC = ends_RD.gather(1, index_RC)

        noise_R1 = inputs["uniforms"][trees_R, level][:, None]
        near_R1 = inputs["near"][trees_R][:, None]
        low_R1, high_R1 = (noise_R1 - near_R1).clamp(min=0), (noise_R1 + near_R1).clamp(max=1)
        overlap_RC = torch.minimum(ends_RC, high_R1) - torch.maximum(ends_RC - probs_RC, low_R1)
        near_RC = overlap_RC.clamp(min=0) / (high_R1 - low_R1)
        guesses_RC = probs_RC + _NEAR_SHARE * (near_RC - probs_RC)

        probs_RW, best_RW = guesses_RC.topk(min(self._topk, guesses_RC.shape[1]), dim=1)
        tokens_RW = index_RC.gather(1, best_RW)
        if self._token_ids_D is not None:
            tokens_RW = self._token_ids_D[tokens_RW]
        return tokens_RW, (probs_RW * inputs["ratios"][level][..., None]).clamp(max=1)

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
