"""vLLM's sampling parameters, as OpenRLHF and its agents write them, and what they are here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from rollout.errors import InvalidInputError
from rollout.types import SamplingParams


@dataclass(kw_only=True, slots=True)
class VllmSamplingParams:
    """Stands in for ``vllm.SamplingParams`` where vllm is not installed. Its names and defaults."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    seed: int | None = None


_HONOURED = {field.name for field in fields(VllmSamplingParams)}
_HARMLESS = {  # how vLLM hands text over, and what it keeps for itself
    "detokenize",
    "spaces_between_special_tokens",
    "output_kind",
    "stream_interval",
    "output_text_buffer_length",
    "skip_clone",
    "skip_reading_prefix_cache",
}


def engine_params(params: Any) -> SamplingParams:
    """The engine's parameters for ``params``, vLLM's own or our stand-in.

    Raises InvalidInputError for what the engine has no equal of.
    """
    _refuse_unless_known(params)
    if params.n != 1:
        raise InvalidInputError("sampling_params.n", params.n, "must be 1: call generate n times")
    if params.logprobs not in (None, 0, 1):
        raise InvalidInputError(
            "sampling_params.logprobs", params.logprobs, "must be None, 0 or 1: the token's own"
        )
    if params.max_tokens is None:
        raise InvalidInputError("sampling_params.max_tokens", None, "must be given")
    stop = params.stop or []
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        max_new_tokens=params.max_tokens,
        min_new_tokens=min(params.min_tokens, params.max_tokens),
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias or {}),
        stop=[stop] if isinstance(stop, str) else list(stop),
        stop_token_ids=list(params.stop_token_ids or []),
        ignore_eos=params.ignore_eos,
    )


def _refuse_unless_known(params: Any) -> None:
    """vLLM gets new parameters with every release: whatever is not at its default counts as set."""
    names = getattr(params, "__struct_fields__", None)  # vLLM's own class is a msgspec.Struct
    if names is None:
        names = [field.name for field in fields(params)]
    defaults = type(params)()
    for name in names:
        if name.startswith("_") or name in _HONOURED | _HARMLESS:  # _...: derived from the others
            continue
        value = getattr(params, name)
        if value != getattr(defaults, name):
            raise InvalidInputError(
                f"sampling_params.{name}", value, "is not implemented; leave it out"
            )
