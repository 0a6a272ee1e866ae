"""Parquet through pyarrow, an extra: imported where a file asks for it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.durable import whole_file
from rollout.errors import InvalidInputError
from rollout.offline.sink import OutputError, cannot_write

_ROWS_PER_GROUP = 1024


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


class ColumnTypes:
    """The Arrow types of columns seen row by row, for an output that must declare them at once."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._pa, self._pq = import_pyarrow("output.path", output)
        self._schema = self._pa.schema([])
        self._rows: list[dict[str, Any]] = []

    def add(self, columns: dict[str, Any]) -> None:
        self._rows.append(columns)
        if len(self._rows) == _ROWS_PER_GROUP:
            self._merge()

    def declare(self, there: Any, names: dict[str, str]) -> None:
        """Take the types from the schema ``there``; ``names`` maps a column here to one there."""
        self._schema = self._pa.schema(
            [there.field(old).with_name(new) for new, old in names.items()]
        )

    def schema(self) -> Any:
        self._merge()
        return self._schema

    def _merge(self) -> None:
        names = {name: None for row in self._rows for name in row}
        for name in names:
            try:
                kind = self._pa.array([row.get(name) for row in self._rows]).type
                self._schema = self._pa.unify_schemas(
                    [self._schema, self._pa.schema([(name, kind)])], promote_options="permissive"
                )
                # Some types, such as that of {}, exist in Arrow and not in Parquet.
                empty = self._pa.schema([(name, kind)]).empty_table()
                self._pq.write_table(empty, io.BytesIO())
            except (self._pa.ArrowException, OverflowError) as error:
                raise InvalidInputError(
                    "output.path",
                    str(self._output),
                    f"the values of column {name!r} do not make a Parquet column ({error}): write "
                    ".jsonl, or leave the column out with data.columns",
                ) from None
        self._rows.clear()


def rollout_schema(columns: list[str], carried: Any) -> Any:
    """The schema of an output: the rollout's own columns, then prompt and carried ones."""
    import pyarrow as pa

    top = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
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
        "top_logprobs": pa.list_(pa.list_(top)),
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
    try:
        with whole_file(path) as file, pq.ParquetWriter(file, schema) as writer:
            for group in _groups(iter(rows)):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
    except OSError as error:
        raise cannot_write(path, error) from None
    except pa.ArrowException as error:
        raise OutputError(f"{path} cannot be written as Parquet: {error}") from None


def read_json_rows(path: Path, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
    """The JSON line that begins at each offset. Raises OutputError where it is none any more."""
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            try:
                yield json.loads(file.readline())
            except ValueError as error:
                raise OutputError(f"{path} was changed at byte {offset}: {error}") from None


def _groups(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while group := list(islice(rows, _ROWS_PER_GROUP)):
        yield group
