"""Why a rollout's logprobs are not those that the engine gives now: temperature or truncation.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollout.trainers.mismatch.result import Cause, Suspect
from rollout.trainers.mismatch.tokens import TokenDifferences

_LEAST = 2e-4  # of a difference of logprobs that is looked at
_FITS = 2e-3  # of the mean that a temperature leaves


def sampling_suspects(tokens: TokenDifferences) -> Iterator[Suspect]:
    """A suspect where rollouts of the engine's own weights have other logprobs than it gives."""
    differences = tokens.own_differences()
    if not len(differences) or differences.abs().max() < _LEAST:
        return
    rows, ids, recorded = zip(*tokens.own_rows, strict=True)
    logits_RV, ids_R1 = torch.stack(rows), torch.tensor(ids)[:, None]
    recorded_R = torch.tensor(recorded)

    def left(log: float) -> float:
        logs_RV = (logits_RV * 2.0**-log).log_softmax(-1)
        return (logs_RV.gather(-1, ids_R1)[:, 0] - recorded_R).abs().mean().item()

    fitted, step = 0.0, 0.4  # logarithms to base 2
    for _ in range(12):
        fitted = min((fitted + step * index for index in range(-8, 9)), key=left)
        step /= 4
    if left(fitted) < _FITS:
        given = tokens.temperature or 1.0
        text = f"the rollouts are of temperature {2**fitted:.3g}, and compared at {given:g}"
        yield Suspect(Cause.SAMPLING, "temperature", text)
    elif (differences < _LEAST).all():
        text = "the rollouts' logprobs are over the tokens that top-p, top-k or min-p left"
        yield Suspect(Cause.SAMPLING, "top_p", text)
    else:
        text = "the rollouts' logprobs are not this engine's: other weights, or penalties"
        yield Suspect(Cause.STALE_WEIGHTS, "rollouts", text)
