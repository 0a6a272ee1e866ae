"""The rows of the output: their columns, and how they are written and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout.engine.durable_files import whole_file
from rollout.errors import InvalidInputError, OutputError
from rollout.offline.config import OutputConfig
from rollout.offline.journal import cannot_write
from rollout.types import FinishReason, Rollout, SamplingParams, TokenExtras

_EXTRAS = tuple(TokenExtras.__dataclass_fields__)
_PER_TOKEN = (
    "logprobs",
    "weight_versions",
    "raw_logprobs",
    "sampling_logprobs",
    "sampling_masks",
    "token_ids_logprobs",
    "entropies",
)
_ROWS_PER_GROUP = 1024

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_TYPES: dict[str, Any] = {
    "prompt_index": _Count,
    "sample_index": _Count,
    "text": str | None,
    "prompt_ids": list[_TokenId],
    "token_ids": list[_TokenId],
    "logprobs": list[float],
    "weight_versions": list[_Count],
    "raw_logprobs": list[float],
    "sampling_logprobs": list[float],
    "sampling_masks": list[list[_TokenId]],
    "top_logprobs": list[list[dict[str, float]]],
    "token_ids_logprobs": list[list[dict[str, float]]],
    "entropies": list[float],
    "routed_experts": list[list[list[int]]],
    "finish_reason": FinishReason,
    "seed": Annotated[int, msgspec.Meta(ge=0)],
    "stats": dict[str, float],
}
"""Every column there may be, and what it holds in JSON."""


def rollout_columns(config: OutputConfig, params: SamplingParams) -> list[str]:
    """The columns `rollout_row` fills."""
    asked = {
        "prompt_ids": config.prompt_ids,
        "raw_logprobs": params.raw_logprobs,
        "sampling_logprobs": params.sampling_logprobs,
        "sampling_masks": params.sampling_mask,
        "top_logprobs": params.top_logprobs,
        "token_ids_logprobs": params.logprob_token_ids,
        "entropies": params.entropy,
        "routed_experts": params.routed_experts,
        "stats": config.stats,
    }
    return [name for name in _TYPES if asked.get(name, True)]


def rollout_row(rollout: Rollout, columns: list[str]) -> dict[str, Any]:
    """The rollout's values by column, as JSON has them."""
    return {name: _value(rollout, name) for name in columns}


def _value(rollout: Rollout, name: str) -> Any:
    match name:
        case "finish_reason":
            return rollout.finish_reason.value
        case "top_logprobs" | "token_ids_logprobs":
            return [
                [{"token_id": token, "logprob": logprob} for token, logprob in pairs]
                for pairs in getattr(rollout.extras, name)
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


class RowCheck:
    """Tells rows that `rollout_row` may have made from others."""

    def __init__(self, columns: list[str]) -> None:
        self._type = msgspec.defstruct("Row", [(name, _TYPES[name]) for name in columns])
        self._per_token = [name for name in _PER_TOKEN if name in columns]

    def fault(self, row: dict[str, Any]) -> str | None:
        """Why a row that was read back is no rollout's; None where it may be one's."""
        try:
            msgspec.convert(row, self._type)
            (row["text"] or "").encode()
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            return f"is no rollout's ({error})"
        num_tokens = len(row["token_ids"])
        for name in self._per_token:
            if len(row[name]) != num_tokens:
                return f"has {num_tokens} token_ids and {len(row[name])} {name}"
        return None


def to_json_line(row: dict[str, Any]) -> bytes:
    """One line, newline included. Values that only Parquet knows become text.

    By json, as the only writer and reader of the NaN and infinities that a prompt's columns and
    logprobs may hold.
    """
    return json.dumps(row, ensure_ascii=False, default=msgspec.to_builtins).encode() + b"\n"


def read_json_rows(path: Path, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
    """The JSON line that begins at each offset. Raises OutputError where it is none any more."""
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            try:
                yield json.loads(file.readline())
            except ValueError as error:
                raise OutputError(f"{path} was changed at byte {offset}: {error}") from None


def import_pyarrow(field: str, path: str | Path) -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet; InvalidInputError names the extra that has them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidInputError(
            field,
            str(path),
            "Parquet needs pyarrow: pip install 'specrollout[data]', or use .jsonl",
        ) from None
    return pyarrow, pyarrow.parquet


def rollout_schema(columns: list[str], carried: Any) -> Any:
    """The Arrow schema of an output: the rollout's own columns, then prompt and carried ones."""
    import pyarrow as pa

    pair = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
    counters = [("verify_steps", pa.int64()), ("drafted", pa.int64()), ("accepted", pa.int64())]
    types = {
        "prompt_index": pa.int64(),
        "sample_index": pa.int32(),
        "text": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "weight_versions": pa.list_(pa.int64()),
        "raw_logprobs": pa.list_(pa.float32()),
        "sampling_logprobs": pa.list_(pa.float32()),
        "sampling_masks": pa.list_(pa.list_(pa.int32())),
        "top_logprobs": pa.list_(pa.list_(pair)),
        "token_ids_logprobs": pa.list_(pa.list_(pair)),
        "entropies": pa.list_(pa.float32()),
        "routed_experts": pa.list_(pa.list_(pa.list_(pa.int16()))),
        "finish_reason": pa.string(),
        "seed": pa.uint64(),
        "stats": pa.struct([("accept_length", pa.float64()), *counters]),
    }
    return pa.schema([*((name, types[name]) for name in columns), *carried])


def write_parquet(path: Path, rows: Iterable[dict[str, Any]], schema: Any) -> None:
    """Write all rows, whole or not at all: a reader never sees a part of the file."""
    pa, pq = import_pyarrow("output.path", path)
    left = iter(rows)
    try:
        with whole_file(path) as file, pq.ParquetWriter(file, schema) as writer:
            while group := list(islice(left, _ROWS_PER_GROUP)):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
    except OSError as error:
        raise cannot_write(path, error) from None
    except pa.ArrowException as error:
        raise OutputError(f"{path} cannot be written as Parquet: {error}") from None
