"""How likely the target is to sample what a draft thinks of, its noise being known.

The target's sample at a position is its inverse distribution function at a uniform number that
depends on the request's seed and the position alone (`rollout/ops/uniforms`). The draft can
look that number up, so it need not guess blindly: where its own distribution function is close to
the target's, the token it finds at the same number is most probably the target's. With two
samplers that share their noise samples agree more often than independent ones could (common random
numbers; Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative
Decoding").

A token that the draft's distribution function gives [F', F) is taken to be sampled with
probability

    sum over w of weight_w * |[F', F) within [u - w, u + w]| / |[u - w, u + w]|

as though the target's function were off by at most w to either side, uniformly; w = 1 is the
draft's own probability of the token, whatever the noise. Greedy requests have no noise: there the
components are the draft's distribution, sharpened more or less. One component more believes in
none of the candidates. The weights are learned from what the target sampled (`mixture.py`).

Legend: R rows, D draft vocabulary, C candidates, K components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms.reference import noise
from rollout.types import Request

WIDTHS = (1.0, 0.25, 0.08, 0.025, 0.008)
SHARPNESS = (1.0, 1.6, 2.5, 4.0, 8.0)
CANDIDATES = 32
"""Of a row's tokens; those beyond are hardly ever worth a node."""

COMPONENTS = len(WIDTHS) + 1
"""The last one believes in none of the candidates."""


class SharedNoise:
    """The inputs of some requests' samples beside the logits."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._params = [request.params for request in requests]
        self._seeds_G = np.array([request.seed for request in requests], dtype=np.uint64)
        self._temperature_G = np.array([each.temperature for each in self._params], np.float32)
        self._truncates_G = np.array([each.truncates for each in self._params], dtype=bool)
        self.is_greedy_G = self._temperature_G == 0

    def candidates(
        self,
        logits_RD: torch.Tensor,
        requests_R: NDArray[np.int64],
        positions_R: NDArray[np.int64],
        count: int,
    ) -> Candidates:
        """The draft's likeliest tokens for each row, and the one at the row's noise.

        Args:
            logits_RD: the draft's, any float dtype; overwritten where float32.
            requests_R: which of the requests each row is of.
            positions_R: of the token that is sampled, from the start of the sequence.
            count: C - 1; fewer where the vocabulary is smaller.
        """
        device = logits_RD.device
        greedy_R = self.is_greedy_G[requests_R]
        divisor_R = np.where(greedy_R, np.float32(1), self._temperature_G[requests_R])
        logits_RD = logits_RD.float()
        if (divisor_R != 1).any():
            logits_RD /= torch.from_numpy(divisor_R).to(device)[:, None]
        if self._truncates_G[requests_R].any():
            self._truncate_(logits_RD, requests_R)
        uniforms_R = noise(self._seeds_G[requests_R], positions_R)
        at_R = torch.from_numpy(uniforms_R).to(device)
        index_RC, probs_RC, ends_RC = likeliest(logits_RD, at_R, count)
        return Candidates(
            index_RC=index_RC.cpu().numpy(),
            probs_RC=probs_RC.cpu().numpy(),
            ends_RC=ends_RC.cpu().numpy(),
            uniforms_R=uniforms_R,
            is_greedy_R=greedy_R,
        )

    def _truncate_(self, logits_RD: torch.Tensor, requests_R: NDArray[np.int64]) -> None:
        params = [self._params[g] for g in requests_R.tolist()]

        def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=logits_RD.device)

        threshold_R = truncation_threshold(
            logits_RD,
            torch.ones(len(params), device=logits_RD.device),  # it was applied before
            tensor([each.top_k for each in params], torch.int64),
            tensor([each.top_p for each in params], torch.float32),
            tensor([each.min_p for each in params], torch.float32),
        )
        logits_RD.masked_fill_(logits_RD < threshold_R[:, None], float("-inf"))


def likeliest(
    logits_RD: torch.Tensor, uniforms_R: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index, probability and end of interval [R, C]: see `Candidates`.

    Args:
        logits_RD: float32, with what the request asks for applied.
        uniforms_R: float64, the noise.
        count: C - 1; fewer where the vocabulary is smaller.
    """
    probs_RD = torch.softmax(logits_RD, dim=1)
    # CUDA's scan of one row, unlike that of several, may round differently from call to call.
    is_alone = probs_RD.is_cuda and len(probs_RD) == 1
    rows_RD = probs_RD.expand(2, -1) if is_alone else probs_RD
    ends_RD = rows_RD.cumsum(dim=1)[: len(probs_RD)]
    count = min(count, probs_RD.shape[1])
    at_noise_R1 = uniforms_R.float()[:, None] * ends_RD[:, -1:]
    first_R1 = torch.searchsorted(ends_RD, at_noise_R1, right=True)
    first_R1 = first_R1.clamp(max=probs_RD.shape[1] - 1)
    others = probs_RD.topk(count, dim=1).indices
    index_RC = torch.cat([first_R1, others], dim=1)
    probs_RC, ends_RC = probs_RD.gather(1, index_RC), ends_RD.gather(1, index_RC)
    probs_RC[:, 0].masked_fill_((first_R1 == others).any(dim=1), 0.0)
    return index_RC, probs_RC.nan_to_num_(), ends_RC.nan_to_num_()


@dataclass(kw_only=True, slots=True)
class Candidates:
    """Tokens the draft thinks of. One that comes twice has probability 0 the first time."""

    index_RC: NDArray[np.int64]  # of the draft's vocabulary
    probs_RC: NDArray[np.float32]  # the draft's
    ends_RC: NDArray[np.float32]  # its distribution function at the token, the token included
    uniforms_R: NDArray[np.float64]
    is_greedy_R: NDArray[np.bool_]

    def of_rows(self, rows: NDArray[np.int64]) -> Candidates:
        return Candidates(
            index_RC=self.index_RC[rows],
            probs_RC=self.probs_RC[rows],
            ends_RC=self.ends_RC[rows],
            uniforms_R=self.uniforms_R[rows],
            is_greedy_R=self.is_greedy_R[rows],
        )

    def components(self) -> NDArray[np.float32]:
        """Float32 [R, C, K]: the probability of each token under each component."""
        found_RCK = np.zeros((*self.probs_RC.shape, COMPONENTS), dtype=np.float32)
        found_RCK[:, :, :-1] = window_probabilities(self.probs_RC, self.ends_RC, self.uniforms_R)
        if self.is_greedy_R.any():
            greedy = self.is_greedy_R
            found_RCK[greedy, :, :-1] = sharpened_probabilities(self.probs_RC[greedy])
        return found_RCK


def window_probabilities(
    probs_RC: NDArray[np.floating], ends_RC: NDArray[np.floating], uniforms_R: NDArray[np.float64]
) -> NDArray[np.float32]:
    """The share that tokens with intervals [end - prob, end) have of the window of each of
    WIDTHS."""
    widths_K = np.array(WIDTHS)
    low_RK = np.maximum(uniforms_R[:, None] - widths_K, 0.0)
    high_RK = np.minimum(uniforms_R[:, None] + widths_K, 1.0)
    begins_RC = ends_RC - probs_RC
    overlap_RCK = np.minimum(ends_RC[:, :, None], high_RK[:, None])
    overlap_RCK -= np.maximum(begins_RC[:, :, None], low_RK[:, None])
    np.maximum(overlap_RCK, 0.0, out=overlap_RCK)
    overlap_RCK /= (high_RK - low_RK)[:, None]
    return overlap_RCK.astype(np.float32)


def sharpened_probabilities(probs_RC: NDArray[np.floating]) -> NDArray[np.float32]:
    """The likeliest tokens' probabilities to the power of each of SHARPNESS, renormalised."""
    sharpness_K = np.array(SHARPNESS, dtype=np.float32)
    highest_R11 = np.maximum(probs_RC.max(axis=1, initial=0.0), 1e-30)[:, None, None]
    powers_RCK = (probs_RC[:, :, None] / highest_R11) ** sharpness_K
    sums_RK = powers_RCK.sum(axis=1)
    sums_RK[:, 0] = 1.0 / highest_R11[:, 0, 0]  # of the whole vocabulary
    return (powers_RCK / np.maximum(sums_RK, 1e-30)[:, None]).astype(np.float32)
