"""From the sampling parameters a verl agent loop sends to the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import InvalidInputError
from rollout.sampling_names import our_fields, refuse_unhonoured
from rollout.types import SamplingParams

_LIMITS = ("max_tokens", "max_new_tokens")


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
    if not given.pop("include_stop_str_in_output", True):
        raise InvalidInputError(
            "sampling_params.include_stop_str_in_output", False, "must be True: tokens are sent"
        )
    refuse_unhonoured(given, lambda name: f"sampling_params.{name}", but=("seed",))
    ours = {"ignore_eos": ignore_eos} | our_fields(given)
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
    params = SamplingParams(**ours, raw_logprobs=raw_logprobs, routed_experts=routed_experts)
    return params, bool(wants_logprobs)
