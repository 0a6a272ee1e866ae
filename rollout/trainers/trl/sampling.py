"""TRL's sampling options as SamplingParams, and rollouts as its trainers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import FIELD_OF, our_fields, refuse_unhonoured
from rollout.types import Rollout, SamplingParams


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
    own = {} if generation_kwargs is None else generation_kwargs
    refuse_unhonoured(own, lambda name: f"generation_kwargs[{name!r}]")
    chosen = our_fields(
        {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "max_new_tokens": max_completion_length,
        }
        | {FIELD_OF.get(name, name): value for name, value in own.items()}
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


def params_of(args: Any, eos_token_ids: Sequence[int]) -> SamplingParams:
    """The sampling parameters of a trainer's config. Raises what `sampling_params` does."""
    return sampling_params(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_completion_length=args.max_completion_length,
        eos_token_ids=eos_token_ids,
        generation_kwargs=getattr(args, "generation_kwargs", None),  # not in every config
    )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample for TRL, of at least one token: TRL reads the last one of each."""

    token_ids: list[int]
    logprobs: list[float | None]  # None: unknown, which TRL takes for the trainer's own
    mask: list[int]  # 1: sampled, to be trained on


def completion_of(rollout: Rollout, filler_id: int) -> Completion:
    """The rollout's tokens; ``filler_id``, masked, for one that failed before its first token."""
    if not rollout.token_ids:
        return Completion([filler_id], [None], [0])
    return Completion(rollout.token_ids, [*rollout.logprobs], [1] * len(rollout.token_ids))
