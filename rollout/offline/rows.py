"""What one row of the output holds."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from typing import Any

from rollout.offline.config import OutputConfig
from rollout.types import Rollout, SamplingParams

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


def to_json_line(row: dict[str, Any]) -> bytes:
    """One line, newline included. Values that only Parquet knows become text."""
    return json.dumps(row, ensure_ascii=False, default=_as_text).encode() + b"\n"


def _as_text(value: object) -> str:
    match value:
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case datetime.timedelta() | decimal.Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written as JSON")
