"""The official client of a server, and its streams joined by choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai

from tests.helpers.hang import HANG_SECONDS
from tests.server.conftest import Live


def client_of(live: Live, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{live.url}/v1", api_key=key, timeout=HANG_SECONDS, max_retries=0
    )


def joined_parts(chunks: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """What the chunks of completions or chats say together, by choice."""
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
