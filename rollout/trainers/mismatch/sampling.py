"""Why a rollout's logprobs are not those that the engine gives now: temperature or truncation.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.trainers.mismatch.result import Cause, Suspect

MAX_ROWS = 32  # whose logits are kept to fit a temperature
_LEAST = 2e-4  # of a difference of logprobs that is looked at
_FITS = 2e-3  # of the mean that a temperature leaves


def sampling_suspects(
    own_differences: torch.Tensor,
    logits_RV: torch.Tensor,
    ids_R: torch.Tensor,
    recorded_R: torch.Tensor,
    temperature: float,
) -> Iterator[Suspect]:
    """A suspect where rollouts of the engine's own weights have other logprobs than it gives.

    Args:
        own_differences: engine less rollout, of all tokens of its weight version.
        logits_RV, ids_R, recorded_R: of some of these tokens.
    """
    if not len(own_differences) or own_differences.abs().max() < _LEAST:
        return

    def left(log: float) -> float:
        logs_RV = (logits_RV * 2.0**-log).log_softmax(-1)
        return (logs_RV.gather(-1, ids_R[:, None])[:, 0] - recorded_R).abs().mean().item()

    fitted, step = 0.0, 0.4  # logarithms to base 2
    for _ in range(12):
        fitted = min((fitted + step * index for index in range(-8, 9)), key=left)
        step /= 4
    if left(fitted) < _FITS:
        text = f"the rollouts are of temperature {2**fitted:.3g}, and compared at {temperature:g}"
        yield Suspect(Cause.SAMPLING, "temperature", text)
    elif (own_differences < _LEAST).all():
        text = "the rollouts' logprobs are over the tokens that top-p, top-k or min-p left"
        yield Suspect(Cause.SAMPLING, "top_p", text)
    else:
        text = "the rollouts' logprobs are not this engine's: other weights, or penalties"
        yield Suspect(Cause.STALE_WEIGHTS, "rollouts", text)
