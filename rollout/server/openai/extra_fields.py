"""Fields of a body that this server does not have.

Other servers know many more fields than these. What cannot change the answer is let through; the
rest is refused by name, unless its value asks for nothing, so that nobody trains on samples of a
distribution they did not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import InvalidInputError

_HARMLESS = frozenset(
    {
        # Who asks, and how it is billed and kept
        "user", "store", "metadata", "service_tier", "safety_identifier", "request_id",
        "session_id",
        # Caches and scheduling: no token depends on them
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt",
        "priority", "stream_interval",
        # Of tools, which are refused themselves
        "parallel_tool_calls",
    }
)  # fmt: skip

_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "length_penalty": (1.0,),
    "thinking_token_budget": (-1,),
}
"""Beside null, false and what is empty."""

_ON = frozenset({"spaces_between_special_tokens", "detokenize", "include_reasoning"})
"""Nothing is asked for by true, and something by false."""


def check_extra_fields(fields: Mapping[str, Any] | None) -> None:
    """Raises InvalidInputError naming the first that cannot be honoured."""
    for name, value in (fields or {}).items():
        if name not in _HARMLESS and not _asks_for_nothing(name, value):
            raise InvalidInputError(name, value, "this server cannot do that: leave it out")


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or name in _ON:
        return value is not False
    return value is False or value in ("", [], {}, *_ASKS_FOR_NOTHING.get(name, ()))
