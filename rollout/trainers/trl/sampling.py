"""TRL's sampling options as SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import FIELD_OF, our_fields, refuse_unhonoured
from rollout.types import SamplingParams


def sampling_params(
    *,
    temperature: float,
    top_p: float,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float,
    max_completion_length: int,
    eos_token_ids: Sequence[int],
    top_logprobs: int,
    generation_kwargs: Mapping[str, Any],
) -> SamplingParams:
    """One set of parameters for every sample of a run.

    ``generation_kwargs`` go over the others, as in TRL. A rollout ends at the trainer's
    ``eos_token_ids``, whatever the checkpoint calls so. Raises InvalidInputError, naming the
    option, for what cannot be honoured.
    """
    refuse_unhonoured(generation_kwargs, lambda name: f"generation_kwargs[{name!r}]")
    chosen = our_fields(
        {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "max_new_tokens": max_completion_length,
        }
        | {FIELD_OF.get(name, name): value for name, value in generation_kwargs.items()}
    )
    if "temperature" in chosen and not chosen["temperature"] > 0:
        raise InvalidInputError(
            "temperature",
            chosen["temperature"],
            "must be > 0: the trainer divides its logits by it",
        )
    stops = [*chosen.pop("stop_token_ids", ())]
    if not chosen.pop("ignore_eos", False):
        stops += eos_token_ids
    return SamplingParams(
        **chosen, stop_token_ids=stops, ignore_eos=True, top_logprobs=top_logprobs
    )
