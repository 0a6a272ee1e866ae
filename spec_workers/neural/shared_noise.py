"""The probability that the target samples a draft's token, given the noise it samples with.

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

Legend: G trees, R rows of logits, D draft vocabulary, C candidates, K components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms.reference import noise
from rollout.types import Request
from spec_workers.neural.arrays import Array, Arrays

Tensors = dict[str, torch.Tensor]

WIDTHS = (1.0, 0.25, 0.08, 0.025, 0.008)
SHARPNESS = (1.0, 1.6, 2.5, 4.0, 8.0)
CANDIDATES = 32
"""The number of a row's tokens that are considered; those beyond are hardly ever worth a node."""

OPTIONAL_INPUTS = ("temperature", "is_greedy", "top_k", "top_p", "min_p")
"""Inputs that may be absent. The kernels that are launched depend on which are present."""


@dataclass(kw_only=True, slots=True)
class Candidates:
    """Candidate tokens of the draft. One that comes twice has probability 0 the first time."""

    index_RC: Array  # int64, of the draft's vocabulary
    probs_RC: Array  # float32, the draft's
    ends_RC: Array  # float32: its distribution function at the token, the token included
    uniforms_R: Array  # float64, the noise
    is_greedy_R: Array | None  # None: none is


def noise_inputs(
    requests: Sequence[Request], ends_G: NDArray[np.int64], padding: int, num_levels: int
) -> dict[str, NDArray]:
    """The inputs of samples beside logits, for `drawn_from`, of trees and padding behind them.

    Those of `OPTIONAL_INPUTS` are present that any request asks for. ``ends_G``: tokens of the
    sequences. ``num_levels``: positions from there on that are drawn for.
    """
    params = [request.params for request in requests]
    seeds_G = np.array([request.seed for request in requests], dtype=np.uint64)
    positions_GL = ends_G[:, None] + np.arange(num_levels)
    uniforms_GL = noise(np.repeat(seeds_G, num_levels), positions_GL.reshape(-1))
    temperature_G = np.array([each.temperature for each in params], dtype=np.float32)
    is_greedy_G = temperature_G == 0
    divisor_G = np.where(is_greedy_G, np.float32(1), temperature_G)
    arrays: dict[str, NDArray] = {"uniforms": uniforms_GL.reshape(positions_GL.shape)}
    if (divisor_G != 1).any():
        arrays["temperature"] = divisor_G
    if is_greedy_G.any():
        arrays["is_greedy"] = is_greedy_G.astype(np.int64)
    if any(each.truncates for each in params):
        arrays["top_k"] = np.array([each.top_k for each in params], dtype=np.int64)
        arrays["top_p"] = np.array([each.top_p for each in params], dtype=np.float32)
        arrays["min_p"] = np.array([each.min_p for each in params], dtype=np.float32)
    if padding:
        ones = ("temperature", "top_p")
        arrays = {
            name: np.concatenate(
                [array, np.full((padding, *array.shape[1:]), name in ones, dtype=array.dtype)]
            )
            for name, array in arrays.items()
        }
    return arrays


def drawn_from(logits_RD: torch.Tensor, inputs: Tensors, trees_R: torch.Tensor) -> torch.Tensor:
    """The draft's logits as the requests' parameters make them, float32.

    Args:
        logits_RD: any float dtype; overwritten where float32.
        inputs: see `noise_inputs`.
        trees_R: int64, each row's tree.
    """
    logits_RD = logits_RD.float()
    if "temperature" in inputs:
        logits_RD /= inputs["temperature"][trees_R][:, None]
    if "top_k" in inputs and len(logits_RD):
        top_k_R, top_p_R, min_p_R = (inputs[name][trees_R] for name in ("top_k", "top_p", "min_p"))
        ones_R = torch.ones_like(top_p_R)  # temperatures were applied before
        threshold_R = truncation_threshold(logits_RD, ones_R, top_k_R, top_p_R, min_p_R)
        logits_RD.masked_fill_(logits_RD < threshold_R[:, None], float("-inf"))
    return logits_RD


def likeliest(
    logits_RD: torch.Tensor, uniforms_R: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index, probability and end of interval [R, C]: see `Candidates`. First the token at the
    row's noise, then the draft's likeliest ones.

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


def component_tables() -> dict[str, NDArray]:
    """The constants that `component_probabilities` reads."""
    return {
        "widths": np.array(WIDTHS, dtype=np.float64),
        "sharpness": np.array(SHARPNESS, dtype=np.float32),
    }


def component_probabilities(
    arrays: Arrays, found: Candidates, tables: Mapping[str, Array]
) -> Array:
    """Float32 [R, C, K - 1]: each token under each component but the last, which gives it none."""
    windows_RCK = window_probabilities(arrays, found, tables["widths"])
    if found.is_greedy_R is None:
        return windows_RCK
    sharpened_RCK = sharpened_probabilities(arrays, found.probs_RC, tables["sharpness"])
    return arrays.alike.where(found.is_greedy_R[:, None, None], sharpened_RCK, windows_RCK)


def window_probabilities(arrays: Arrays, found: Candidates, widths_K: Array) -> Array:
    """The share that tokens with intervals [end - prob, end) have of the window of each width."""
    alike, uniforms_R1 = arrays.alike, found.uniforms_R[:, None]
    low_RK = (uniforms_R1 - widths_K).clip(min=0.0)
    high_RK = (uniforms_R1 + widths_K).clip(max=1.0)
    begins_RC = found.ends_RC - found.probs_RC
    overlap_RCK = alike.minimum(found.ends_RC[:, :, None], high_RK[:, None])
    overlap_RCK = overlap_RCK - alike.maximum(begins_RC[:, :, None], low_RK[:, None])
    return arrays.float32(overlap_RCK.clip(min=0.0) / (high_RK - low_RK)[:, None])


def sharpened_probabilities(arrays: Arrays, probs_RC: Array, sharpness_K: Array) -> Array:
    """The likeliest tokens' probabilities to the power of each sharpness, renormalised; to the
    power of one they stay those of the whole vocabulary."""
    highest_R11 = arrays.alike.amax(probs_RC, 1).clip(min=1e-30)[:, None, None]
    powers_RCK = (probs_RC[:, :, None] / highest_R11) ** sharpness_K
    sums_RK = powers_RCK.sum(axis=1)
    sums_RK[:, 0] = 1.0 / highest_R11[:, 0, 0]
    return powers_RCK / sums_RK.clip(min=1e-30)[:, None]
