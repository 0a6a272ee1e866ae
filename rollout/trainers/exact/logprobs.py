"""The logprobs of chosen tokens as the sampler gives them."""

from __future__ import annotations

import math

import torch

from rollout.errors import InvalidInputError
from rollout.ops import categorical
from rollout.trainers.exact.functions import exactly


def token_logprobs(
    logits_BTV: torch.Tensor, ids_BT: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """The engine's logprobs [B, T], float32, of tokens by logits [B, T, V] of `exact_forward`; any
    other leading dimensions do too.

    Args:
        ids_BT: int64, the token after each position.
        temperature: of the requests; 0 gives those of temperature 1, as greedy requests have.

    Raises InvalidInputError for a temperature below 0, ids of another shape, and ids outside the
    vocabulary.
    """
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (is_number and 0 <= temperature < math.inf):
        raise InvalidInputError("temperature", temperature, "must be a finite number >= 0")
    shape, vocab_size = logits_BTV.shape[:-1], logits_BTV.shape[-1]
    if ids_BT.shape != shape:
        raise InvalidInputError("ids_BT", list(ids_BT.shape), f"must have the shape {list(shape)}")
    if ids_BT.numel() and not (int(ids_BT.min()) >= 0 and int(ids_BT.max()) < vocab_size):
        raise InvalidInputError(
            "ids_BT", "an id", f"must be in [0, {vocab_size}); mask others later"
        )
    divisor, tokens_R = temperature or 1.0, ids_BT.flatten()

    def op(logits_BTV: torch.Tensor) -> torch.Tensor:
        rows_RV = logits_BTV.flatten(0, -2)
        temperature_R = torch.full((len(rows_RV),), float(temperature), device=rows_RV.device)
        return categorical.token_logprobs(rows_RV, temperature_R, tokens_R).view(shape)

    def plain(logits_BTV: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(logits_BTV.dtype, torch.float32)
        logprobs_BTV = (logits_BTV.to(wide) / divisor).log_softmax(-1)
        return logprobs_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)

    return exactly(op, plain, logits_BTV)
