"""From the sampling parameters a verl agent loop sends to the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollout.errors import InvalidInputError
from rollout.types import SamplingParams

_LIMITS = ("max_tokens", "max_new_tokens")
_RENAMED = {"min_tokens": "min_new_tokens"}
_SET_BY_US = {"seed", "n", "max_new_tokens", "raw_logprobs", "routed_experts"}
_LOST = {"sampling_logprobs", "top_logprobs", "entropy"}  # verl's TokenOutput has no place for them
_OURS = {field.name for field in fields(SamplingParams)} - _SET_BY_US - _LOST
_ACCEPTED_IF = {  # those that change nothing at these values
    "n": (None, 1),
    "seed": (None,),
    "prompt_logprobs": (None,),
    "best_of": (None, 1),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "detokenize": (True, False),
    "include_stop_str_in_output": (True,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLimits:
    """Tokens, of a whole response, as verl's rollout configuration gives them."""

    prompt_length: int
    response_length: int

    def default(self, prompt_len: int) -> int:
        """Where a request names no limit: what is left of both lengths, by several turns too."""
        return min(self.response_length, self.prompt_length + self.response_length - prompt_len)


def engine_params(
    sent: Mapping[str, Any],
    *,
    prompt_len: int,
    partial_len: int,
    max_context_len: int,
    limits: ResponseLimits,
    ignore_eos: bool,
    stop_token_ids: tuple[int, ...] = (),
    raw_logprobs: bool = False,
    routed_experts: bool = False,
) -> tuple[SamplingParams, bool]:
    """The engine's parameters, and whether logprobs are wanted. One sent as None was not given.

    ``partial_len`` tokens of the response exist; a limit that was sent counts what comes after
    them. Raises InvalidInputError for a parameter the engine has not, and for a prompt that leaves
    no room.
    """
    given = {name: value for name, value in sent.items() if value is not None}
    wants_logprobs = given.pop("logprobs", False)
    if wants_logprobs not in (False, True):  # 0 and 1 equal them
        raise InvalidInputError(
            "sampling_params.logprobs", wants_logprobs, "must be False or True: the token's own"
        )
    named = [given.pop(name) for name in _LIMITS if name in given]
    left = next(iter(named), None)
    ours: dict[str, Any] = {
        "ignore_eos": ignore_eos,
        "raw_logprobs": raw_logprobs,
        "routed_experts": routed_experts,
    }
    for name, value in given.items():
        if name in _ACCEPTED_IF:
            if value not in _ACCEPTED_IF[name]:
                shown = " or ".join(map(repr, _ACCEPTED_IF[name]))
                raise InvalidInputError(f"sampling_params.{name}", value, f"must be {shown}")
        elif (own := _RENAMED.get(name, name)) in _OURS:
            ours[own] = value
        else:
            raise InvalidInputError(
                f"sampling_params.{name}", value, "cannot be honoured; leave it out"
            )
    if not ours["ignore_eos"]:
        ours["stop_token_ids"] = [*(ours.get("stop_token_ids") or ()), *stop_token_ids]
    room = max_context_len - prompt_len
    if room - partial_len < 1:
        raise InvalidInputError(
            "prompt_ids",
            f"{prompt_len + partial_len} tokens",
            f"leave no room in the context of {max_context_len}",
        )
    total = limits.default(prompt_len) if left is None else partial_len + left
    ours["max_new_tokens"] = max(partial_len + 1, min(total, room))
    return SamplingParams(**ours), bool(wants_logprobs)
