"""The rows of the output: their columns, and how they are written and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

import msgspec

from rollout.engine.durable_files import whole_file
from rollout.errors import InvalidInputError, OutputError
from rollout.offline.config import OutputConfig
from rollout.offline.journal import cannot_write
from rollout.types import FinishReason, Rollout, SamplingParams, TokenExtras

_EXTRAS = tuple(TokenExtras.__dataclass_fields__)
_ROWS_PER_GROUP = 1024

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class _Column:
    """The type of a column: values, or lists of them, nested ``depth`` deep."""

    json: Any  # type of a value in JSON
    arrow: str  # type of a value in Parquet, by its name in pyarrow or in `rollout_schema`
    depth: int = 0
    option: str | None = None  # which asks for the column; None: always there
    is_per_token: bool = False  # whether the list has an entry for each output token

    @property
    def json_type(self) -> Any:
        whole = self.json
        for _ in range(self.depth):
            whole = GenericAlias(list, (whole,))
        return whole


def _of_tokens(json: Any, arrow: str, option: str | None = None, depth: int = 1) -> _Column:
    return _Column(json, arrow, depth, option, is_per_token=True)


_COLUMNS = {
    "prompt_index": _Column(_Count, "int64"),
    "sample_index": _Column(_Count, "int32"),
    "text": _Column(str | None, "string"),
    "prompt_ids": _Column(_TokenId, "int32", 1, "output.prompt_ids"),
    "token_ids": _of_tokens(_TokenId, "int32"),
    "logprobs": _of_tokens(float, "float32"),
    "weight_versions": _of_tokens(_Count, "int64"),
    "raw_logprobs": _of_tokens(float, "float32", "sampling.raw_logprobs"),
    "sampling_logprobs": _of_tokens(float, "float32", "sampling.sampling_logprobs"),
    "sampling_masks": _of_tokens(_TokenId, "int32", "sampling.sampling_mask", 2),
    "top_logprobs": _of_tokens(dict[str, float], "pair", "sampling.top_logprobs", 2),
    "token_ids_logprobs": _of_tokens(dict[str, float], "pair", "sampling.logprob_token_ids", 2),
    "entropies": _of_tokens(float, "float32", "sampling.entropy"),
    "routed_experts": _Column(int, "int16", 3, "sampling.routed_experts"),
    "finish_reason": _Column(FinishReason, "string"),
    "seed": _Column(int, "int64"),
    "stats": _Column(dict[str, float], "stats", option="output.stats"),
}
"""Every column there may be, in the order of the output."""


def rollout_columns(config: OutputConfig, params: SamplingParams) -> list[str]:
    """The columns `rollout_row` fills."""
    settings = {"output": config, "sampling": params}

    def is_asked_for(option: str | None) -> bool:
        if option is None:
            return True
        section, _, name = option.partition(".")
        return bool(getattr(settings[section], name))

    return [name for name, column in _COLUMNS.items() if is_asked_for(column.option)]


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
        types = [(name, _COLUMNS[name].json_type) for name in columns]
        self._type = msgspec.defstruct("Row", types)
        self._per_token = [name for name in columns if _COLUMNS[name].is_per_token]

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


def job_rows(path: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a job's output, JSONL or Parquet, each with where it stands.

    Raises InvalidInputError naming ``field`` for a file that cannot be read and a row that is none.
    """
    try:
        if path.suffix == ".parquet":
            _, parquet = import_pyarrow(field, path)
            with parquet.ParquetFile(path) as file:
                batches = (batch.to_pylist() for batch in file.iter_batches(_ROWS_PER_GROUP))
                for number, row in enumerate(chain.from_iterable(batches), start=1):
                    yield f"{path}, row {number}", row
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _object_of(line, where, field)
    except UnicodeDecodeError:
        raise InvalidInputError(field, str(path), "is not JSONL text") from None
    except OSError as error:
        raise InvalidInputError(field, str(path), f"cannot be read: {error.strerror}") from None


def _object_of(line: str, where: str, field: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInputError(field, where, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InvalidInputError(field, where, "is no JSON object, as a job's rows are")
    return row


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

    counters = [("verify_steps", pa.int64()), ("drafted", pa.int64()), ("accepted", pa.int64())]
    structs = {
        "pair": pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]),
        "stats": pa.struct([("accept_length", pa.float64()), *counters]),
    }

    def arrow_type(column: _Column) -> Any:
        whole = structs.get(column.arrow) or getattr(pa, column.arrow)()
        for _ in range(column.depth):
            whole = pa.list_(whole)
        return whole

    return pa.schema([*((name, arrow_type(_COLUMNS[name])) for name in columns), *carried])


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
