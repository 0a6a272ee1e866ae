"""The official client, and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai

from rollout import Rollout
from tests.helpers.hang import HANG_SECONDS
from tests.server.conftest import Live


def client_of(live: Live, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{live.url}/v1", api_key=key, timeout=HANG_SECONDS, max_retries=0
    )


def async_client_of(live: Live) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", timeout=HANG_SECONDS, max_retries=0
    )


def top_of(rollout: Rollout, count: int) -> list[list[float]]:
    """The logprobs of the most likely tokens at each place."""
    return [[logprob for _, logprob in top[:count]] for top in rollout.extras.top_logprobs]


def joined_parts(chunks: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """By choice what its chunks say together, of completions and of chats."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(
                part.index, {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "a choice goes on after its end"
            text = part.text if hasattr(part, "text") else part.delta.content
            choice["text"] += text or ""
            choice["token_ids"] += getattr(part, "token_ids", None) or []
            if part.logprobs is not None:
                choice["logprobs"].append(part.logprobs)
            choice["finish_reason"] = part.finish_reason
    return choices
