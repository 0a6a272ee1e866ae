"""Why a rollout's logprobs are not those that the engine gives now: temperature or truncation.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rollout.trainers.mismatch.result import Cause, Suspect

MAX_ROWS = 32  # whose logits are kept to fit a temperature
_LEAST = 2e-4  # of a difference of logprobs that is looked at
_FITS = 2e-3  # of the mean that a temperature leaves


def sampling_suspect(
    own_differences: torch.Tensor,
    logits_RV: torch.Tensor,
    ids_R: torch.Tensor,
    recorded_R: torch.Tensor,
    temperature: float,
) -> Suspect | None:
    """The suspect where rollouts of the engine's own weights have other logprobs than it gives.

    Args:
        own_differences: engine less rollout, of all tokens of its weight version.
        logits_RV, ids_R, recorded_R: of some of these tokens.
    """
    if not len(own_differences) or own_differences.abs().max() < _LEAST:
        return None

    def left(other: float) -> float:
        logs_RV = (logits_RV.float() / other).log_softmax(-1)
        found_R = logs_RV.gather(-1, ids_R[:, None])[:, 0]
        return (found_R - recorded_R).abs().mean().item()

    fitted = _smallest(left)
    if left(fitted) < _FITS:
        text = (
            f"the rollouts' logprobs are at temperature {fitted:.3g}, compared at {temperature:g}"
        )
        return Suspect(Cause.SAMPLING, "temperature", text)
    if (own_differences < _LEAST).all():
        text = "the rollouts' logprobs are of what top-p, top-k or min-p left, the trainer's of all"
        return Suspect(Cause.SAMPLING, "top_p", text)
    text = (
        "the rollouts' logprobs are not this engine's: other weights, penalties or another engine"
    )
    return Suspect(Cause.STALE_WEIGHTS, "rollouts", text)


def _smallest(left: Callable[[float], float]) -> float:
    """The temperature in 0.1 to 5 that leaves least."""
    step, best = 2.0, 0.0  # of its logarithm
    for _ in range(12):
        tried = [best + step * index / 8 for index in range(-8, 9)]
        best = min(tried, key=lambda log: left(math.exp(log)))
        step /= 4
    return math.exp(best)
