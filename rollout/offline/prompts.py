"""Reads prompts, one row per prompt.

A prompt is text (taken as it stands), chat messages or token ids.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError
from rollout.offline.config import DataConfig
from rollout.offline.output_rows import import_pyarrow
from rollout.offline.prompt_source import read_source
from rollout.types import Prompt

PROMPT_COLUMNS = (
    "prompt",
    "messages",
    "text",
    "question",
    "token_ids",
    "input_ids",
    "prompt_ids",
)


@dataclass(frozen=True, slots=True)
class PromptRow:
    index: int  # 0-based among the file's rows, broken ones included: seeds derive from it
    where: str  # "line 3"
    prompt_column: str
    prompt: Prompt
    extras: dict[str, Any]  # the columns to carry through


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row that cannot be used."""

    index: int
    where: str
    reason: str


def carried(row: PromptRow) -> dict[str, Any]:
    """The columns that the output takes from the prompts: the prompt as it was, and extra
    columns."""
    return {"prompt": row.prompt, **row.extras}


class PromptFile:
    """The prompts of a file or a dataset, read once; later changes are not seen."""

    def __init__(self, config: DataConfig) -> None:
        """Raises InvalidInputError for prompts that cannot be read."""
        self.path = Path(config.path)
        self._config = config
        self._content, self.is_parquet = read_source(config)
        self.sha256 = hashlib.sha256(self._content).hexdigest()

    def rows(self) -> Iterator[PromptRow | BrokenRow]:
        """Every row up to ``data.limit``, in file order. Blank lines are not rows."""
        raw_rows: Iterator[tuple[str, bytes | dict[str, Any]]]
        raw_rows = self._parquet_rows() if self.is_parquet else self._jsonl_rows()
        for index, (where, raw) in enumerate(islice(raw_rows, self._config.limit)):
            try:
                yield self._row(index, where, _parse_json(raw) if isinstance(raw, bytes) else raw)
            except _BrokenRowError as error:
                yield BrokenRow(index, where, str(error))

    def _jsonl_rows(self) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
        noun = "line" if ".jsonl" in self.path.suffixes else "row"
        for number, line in enumerate(io.BytesIO(self._content), start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield f"{noun} {number}", text

    def _parquet_rows(self) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
        number = 0
        with self._parquet() as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row

    def arrow_schema(self) -> Any:
        """The columns' Arrow types, where the file is Parquet."""
        with self._parquet() as file:
            return file.schema_arrow

    @contextmanager
    def _parquet(self) -> Iterator[Any]:
        """The file opened. What goes wrong while it is read is an InvalidInputError."""
        pa, pq = import_pyarrow("data.path", self._config.path)
        try:
            content = pa.BufferReader(self._content)
            with pq.ParquetFile(content, page_checksum_verification=True) as file:
                names = file.schema_arrow.names
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise InvalidInputError(
                        "data.path", self._config.path, f"has columns twice: {', '.join(twice)}"
                    )
                yield file
        except InvalidInputError:
            raise
        # Damaged text, dates beyond Python's, time zones that this machine does not know.
        except (pa.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
            raise InvalidInputError(
                "data.path", self._config.path, f"cannot be read as Parquet: {error}"
            ) from None

    def _row(self, index: int, where: str, columns: dict[str, Any]) -> PromptRow:
        column = self._prompt_column(columns)
        return PromptRow(
            index, where, column, _prompt(column, columns[column]), self._extras(columns, column)
        )

    def _prompt_column(self, columns: dict[str, Any]) -> str:
        wanted = self._config.prompt_column
        candidates = PROMPT_COLUMNS if wanted is None else (wanted,)
        for column in candidates:
            if columns.get(column) is not None:
                return column
        if empty := [column for column in candidates if column in columns]:
            raise _BrokenRowError(f"has no prompt: {', '.join(empty)} is null")
        remedy = "" if wanted else "; name the right one with data.prompt_column"
        raise _BrokenRowError(
            f"has no prompt: none of {', '.join(candidates)} among its columns "
            f"({', '.join(columns) or 'none'}){remedy}"
        )

    def _extras(self, columns: dict[str, Any], prompt_column: str) -> dict[str, Any]:
        if self._config.columns is None:
            return {
                name: value
                for name, value in columns.items()
                # A null under another prompt column's name says that this row does not use it.
                if name != prompt_column and not (value is None and name in PROMPT_COLUMNS)
            }
        missing = [name for name in self._config.columns if name not in columns]
        if missing:
            raise _BrokenRowError(f"lacks {', '.join(missing)}, which data.columns asks for")
        return {name: columns[name] for name in self._config.columns}


class _BrokenRowError(ValueError):
    """Why one row is no prompt."""


def _parse_json(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BrokenRowError(f"is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _BrokenRowError(f"is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 5000 open brackets
        raise _BrokenRowError(f"cannot be read as JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BrokenRowError('is not an object like {"prompt": "..."}')
    if b"\\u" in line:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _BrokenRowError("holds half of a surrogate pair, which is no text") from None
    return row


def _prompt(column: str, value: Any) -> Prompt:
    if not isinstance(value, (str, list)):
        raise _BrokenRowError(
            f"{column} is of type {type(value).__name__}; must be text, a list of messages or of "
            "token ids"
        )
    if not value:
        raise _BrokenRowError(f"{column} is empty")
    if isinstance(value, str):
        return value
    if isinstance(value[0], dict):
        return [_message(column, number, message) for number, message in enumerate(value, start=1)]
    for token in value:
        if type(token) is not int or token < 0:  # bool is an int too
            raise _BrokenRowError(f"{column} holds {token!r}; token ids are integers >= 0")
    return value


def _message(column: str, number: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _BrokenRowError(f"{column}: message {number} is not an object")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise _BrokenRowError(f"{column}: message {number} needs a text {key!r}")
    # Parquet fills what a message does not have with null.
    return {key: value for key, value in message.items() if value is not None}
