"""The rows of the output."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import uuid
from typing import Any

from rollout.offline.config import OutputConfig
from rollout.types import FinishReason, Rollout, SamplingParams

_PER_TOKEN = ("logprobs", "weight_versions", "raw_logprobs", "sampling_logprobs", "entropies")
_EXTRAS = ("raw_logprobs", "sampling_logprobs", "top_logprobs", "entropies")


def rollout_columns(config: OutputConfig, params: SamplingParams) -> list[str]:
    """The columns `rollout_row` fills."""
    asked = (params.raw_logprobs, params.sampling_logprobs, params.top_logprobs, params.entropy)
    return [
        "prompt_index",
        "sample_index",
        "text",
        *(["prompt_ids"] if config.prompt_ids else []),
        "token_ids",
        "logprobs",
        "weight_versions",
        *(name for name, wanted in zip(_EXTRAS, asked, strict=True) if wanted),
        *(["routed_experts"] if params.routed_experts else []),
        "finish_reason",
        "seed",
        *(["stats"] if config.stats else []),
    ]


def rollout_row(rollout: Rollout, columns: list[str]) -> dict[str, Any]:
    return {name: _value(rollout, name) for name in columns}


def _value(rollout: Rollout, name: str) -> Any:
    match name:
        case "finish_reason":
            return rollout.finish_reason.value
        case "top_logprobs":
            return [
                [{"token_id": token, "logprob": logprob} for token, logprob in top]
                for top in rollout.extras.top_logprobs
            ]
        case "routed_experts":
            routes = rollout.routed_experts
            return [] if routes is None else routes.tolist()
        case "stats":
            stats = rollout.stats
            return {
                "accept_length": stats.accept_length,
                "verify_steps": stats.verify_steps,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
            }
        case _ if name in _EXTRAS:
            return getattr(rollout.extras, name)
        case _:
            return getattr(rollout, name)


def row_fault(row: dict[str, Any], columns: list[str]) -> str | None:
    """Why a row that was read back is none that `rollout_row` made; None where it may be one."""
    for name in columns:
        if name not in row:
            return f"has no {name}"
        if not _is_value(name, row[name]):
            return f"has a {name} that no rollout has"
    num_tokens = len(row["token_ids"])
    for name in _PER_TOKEN:
        if name in columns and len(row[name]) != num_tokens:
            return f"has {num_tokens} token_ids and {len(row[name])} {name}"
    return None


def _is_value(name: str, value: Any) -> bool:
    match name:
        case "prompt_index" | "sample_index":
            return _is_count(value, 1 << 63)
        case "seed":
            return _is_count(value, 1 << 64)
        case "token_ids" | "prompt_ids":
            return _are_counts(value, 1 << 31)
        case "weight_versions":
            return _are_counts(value, 1 << 63)
        case "logprobs" | "raw_logprobs" | "sampling_logprobs" | "entropies":
            return isinstance(value, list) and set(map(type, value)) <= {float, int}
        case "text":
            return value is None or (isinstance(value, str) and _is_utf8(value))
        case "finish_reason":
            return value in list(FinishReason)
        case "stats":
            return isinstance(value, dict)
        case _:
            return isinstance(value, list)


def _are_counts(values: Any, end: int) -> bool:
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < end)


def _is_count(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end  # bool is an int too


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def to_json_line(row: dict[str, Any]) -> bytes:
    """One line, newline included. Values that only Parquet knows become text."""
    return json.dumps(row, ensure_ascii=False, default=_as_text).encode() + b"\n"


def _as_text(value: object) -> str:
    match value:
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case datetime.timedelta() | decimal.Decimal() | uuid.UUID():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written as JSON")
