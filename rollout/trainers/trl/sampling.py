"""TRL's sampling options as SamplingParams, and rollouts as its trainers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rollout.errors import InvalidInputError
from rollout.types import Rollout, SamplingParams

# What `generation_kwargs` may hold: names of vLLM's SamplingParams, and those of transformers'
# GenerationConfig, which TRL wants where no vLLM is configured.
_HONOURED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "seed": "seed",
}
# Text is the trainer's to decode.
_HARMLESS = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "use_cache"}
_FIXED = {"n": 1, "num_return_sequences": 1, "num_beams": 1, "do_sample": True}


def sampling_params(
    *,
    temperature: float,
    top_p: float,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float,
    max_completion_length: int,
    eos_token_ids: Sequence[int],
    top_logprobs: int = 0,
    generation_kwargs: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """One set of parameters for every sample of a run.

    ``generation_kwargs`` go over the others, as in TRL. A rollout ends at the trainer's
    ``eos_token_ids``, whatever the checkpoint calls so. Raises InvalidInputError, naming the
    option, for what cannot be honoured.
    """
    chosen: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "max_new_tokens": max_completion_length,
        "top_logprobs": top_logprobs,
    }
    for name, value in (generation_kwargs or {}).items():
        _refuse_unless_known(name, value)
        if name in _HONOURED:
            chosen[_HONOURED[name]] = value
    if not chosen["temperature"] > 0:
        raise InvalidInputError(
            "temperature",
            chosen["temperature"],
            "must be > 0: the trainer divides its logits by it",
        )
    defaults = {field.name for field in fields(SamplingParams)}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    assert chosen.keys() <= defaults
    if isinstance(chosen.get("stop"), str):
        chosen["stop"] = [chosen["stop"]]
    stops = [*chosen.get("stop_token_ids", ())]
    if not chosen.get("ignore_eos", False):
        stops += eos_token_ids
    return SamplingParams(**chosen | {"stop_token_ids": stops, "ignore_eos": True})


def _refuse_unless_known(name: str, value: object) -> None:
    field = f"generation_kwargs[{name!r}]"
    if name in _FIXED:
        if value is not None and value != _FIXED[name]:
            raise InvalidInputError(field, value, f"can only be {_FIXED[name]}")
    elif name not in _HONOURED and name not in _HARMLESS:
        known = ", ".join(sorted(_HONOURED))
        raise InvalidInputError(
            field, value, f"is nothing this engine can honour; there are {known}"
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """At least one token: TRL reads the last one of each."""

    token_ids: list[int]
    logprobs: list[float | None]  # None: unknown, which TRL takes for the trainer's own
    mask: list[int]  # 1: sampled, to be trained on


def completion_of(rollout: Rollout, filler_id: int) -> Completion:
    """The rollout's tokens; ``filler_id``, masked, for one that failed before its first token."""
    if not rollout.token_ids:
        return Completion([filler_id], [None], [0])
    return Completion(rollout.token_ids, [*rollout.logprobs], [1] * len(rollout.token_ids))
