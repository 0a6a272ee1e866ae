"""Fields of bodies: their types, their limits, and the refusal of unknown ones.

Unknown fields are refused by name, unless they cannot change the answer or their value is neutral:
nobody should train on samples of another distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from rollout.errors import InvalidInputError
from rollout.types import SamplingParams

T = TypeVar("T")


Listed = Annotated[list[T], Field(fail_fast=True)]


def _known_biases(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """If a bias has a wrong type, pydantic checks the first such one only."""
    if isinstance(value, Mapping):
        for token, bias in value.items():
            if type(bias) is not float and type(bias) is not int:
                return check({token: bias})
    return check(value)


Biases = Annotated[dict[str, float], WrapValidator(_known_biases)]
"""JSON's form of ``logit_bias``: keys are token ids as texts."""


def biases_by_id(biases: Mapping[str, float] | None, field: str) -> dict[int, float]:
    """The biases by token id. Raises InvalidInputError naming ``field``."""
    try:
        return {int(token): bias for token, bias in (biases or {}).items()}
    except ValueError:
        raise InvalidInputError(field, list(biases or {}), "its keys must be token ids") from None


_MAX_TEXTS = 64  # stop strings of a sample, patterns of stops, and bad words
_LONGEST_TEXT = 1024  # characters
_MAX_LISTED_TOKENS = 1024


def check_params(params: SamplingParams, vocab_size: int, has_tokenizer: bool) -> None:
    """Raises InvalidInputError for too many texts or tokens, and ids out of the vocabulary."""
    # Each sample keeps a set of stop_token_ids, and each token takes a logprob for each of
    # logprob_token_ids.
    for name in ("stop_token_ids", "logprob_token_ids"):
        if (count := len(getattr(params, name))) > _MAX_LISTED_TOKENS:
            raise InvalidInputError(f"len({name})", count, f"at most {_MAX_LISTED_TOKENS}")
    for name in ("logit_bias", "logprob_token_ids", "allowed_token_ids"):
        ids = getattr(params, name) or ()
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidInputError(name, token, f"must be in [0, {vocab_size})")
    # They are looked for at every token, on the engine's thread.
    for name in ("stop", "stop_regex", "bad_words"):
        texts = getattr(params, name)
        longest = max(map(len, texts), default=0)
        if len(texts) > _MAX_TEXTS or longest > _LONGEST_TEXT:
            raise InvalidInputError(
                name,
                f"{len(texts)} of up to {longest} characters",
                f"at most {_MAX_TEXTS} texts of {_LONGEST_TEXT} characters",
            )
        if texts and not has_tokenizer:
            raise InvalidInputError(name, texts, "texts need a tokenizer")


MAX_RID_LEN = 1024  # characters; every sample of a call has a name of its own that begins with it
Rid = Annotated[
    str,
    Field(min_length=1, max_length=MAX_RID_LEN, description="the name to abort the call by"),
]


class Body(BaseModel):
    """A body that refuses unknown fields: they would lack the effect that their sender expects."""

    model_config = ConfigDict(extra="forbid")


_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "sampling_logprobs_mode": ("selected",),
    "length_penalty": (1.0,),
    "thinking_token_budget": (-1,),
    "best_of": (1,),
    "truncate_prompt_tokens": (-1,),  # to what the context holds: longer ones are refused
}
"""Neutral values of unknown fields, beside null, false and empty ones."""

_ON = frozenset({"spaces_between_special_tokens", "detokenize", "include_reasoning"})
"""Unknown fields that ask for something only when they are false."""


def refuse_unknown(fields: Mapping[str, Any] | None, harmless: Set[str], prefix: str = "") -> None:
    """Raises InvalidInputError for the first that is set and would change the answer.

    ``harmless`` ones change no token and nothing that is answered.
    """
    for name, value in (fields or {}).items():
        if name not in harmless and not _asks_for_nothing(name, value):
            raise InvalidInputError(prefix + name, value, "unsupported field; remove it")


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or name in _ON:
        return value is not False
    return value is False or value in ("", [], {}, *_ASKS_FOR_NOTHING.get(name, ()))


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None  # the field that is wrong
    code: int | str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ChangeBody(BaseModel):
    """The answer to a call that changes the engine: ``{"success", "message"}`` and fields of its
    own."""

    model_config = ConfigDict(extra="allow")

    success: bool
    message: str


Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {"model": ErrorBody, "description": "Refused: nothing was done"},
    "5XX": {"model": ErrorBody, "description": "Not now, or never: the message says why"},
}
CHANGED: Responses = {200: {"model": ChangeBody}}
EVENTS: Responses = {200: {"content": {"text/event-stream": {}}}}
"""A route answers with events where ``stream`` is set, else with JSON."""
