"""Checks the rows of the prompts, as far as that takes no model."""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError
from rollout.offline.config import OnError
from rollout.offline.output_rows import import_pyarrow, to_json_line
from rollout.offline.prompts import BrokenRow, PromptFile, PromptRow, carried

log = logging.getLogger(__name__)

_MAX_SHOWN = 10
_ROWS_PER_MERGE = 1024


@dataclass(kw_only=True, slots=True)
class CheckedPrompts:
    """A prompts file all of whose rows are known to be good, or to be skipped."""

    file: PromptFile
    num_rows: int = 0  # broken ones included
    skipped: set[int] = field(default_factory=set)
    carried_schema: Any = None  # of prompt and extra columns; only where the output is Parquet

    @property
    def num_prompts(self) -> int:
        """Rows that are not skipped."""
        return self.num_rows - len(self.skipped)

    def rows(self) -> Iterator[PromptRow]:
        """The good rows, in file order."""
        for row in self.file.rows():
            if isinstance(row, PromptRow) and row.index not in self.skipped:
                yield row


def check_rows(
    file: PromptFile, on_error: OnError, output: Path, reserved: Collection[str]
) -> CheckedPrompts:
    """Check every row of the file. ``reserved`` are columns the output has of its own.

    Raises InvalidInputError for broken rows, unless they are skipped, for a column that would be
    there twice, and for a file without prompts.
    """
    checked = CheckedPrompts(file=file)
    types = ColumnTypes(output) if output.suffix == ".parquet" else None
    sources: dict[str, str] = {}  # column in the output -> column in the file
    broken: list[BrokenRow] = []
    for row in file.rows():
        checked.num_rows += 1
        if isinstance(row, BrokenRow):
            broken.append(row)
            continue
        if twice := row.extras.keys() & {"prompt", *reserved}:
            raise InvalidInputError(
                "data.path",
                str(file.path),
                f"{row.where} has columns that the output has too: {', '.join(sorted(twice))}; "
                "rename them, or copy others with data.columns",
            )
        if types is not None:
            sources |= {"prompt": row.prompt_column} | {name: name for name in row.extras}
            if not file.is_parquet:
                types.add(carried(row), row.where)
        else:
            _check_json(file, row)
    handle_broken(broken, checked, on_error)
    if types is not None:
        if file.is_parquet:
            types.declare(file.arrow_schema(), sources)
        checked.carried_schema = types.schema()
    return checked


def _check_json(file: PromptFile, row: PromptRow) -> None:
    for name, value in carried(row).items():
        try:
            to_json_line({name: value})
        except (TypeError, RecursionError) as error:
            raise InvalidInputError(
                "data.path",
                str(file.path),
                f"{row.where}, column {name!r}: {error}; copy other columns with data.columns",
            ) from None


def handle_broken(broken: list[BrokenRow], checked: CheckedPrompts, on_error: OnError) -> None:
    """Skip the rows, or raise InvalidInputError: for them, or where no other row is left."""
    path = str(checked.file.path)
    shown = [f"  {row.where} {row.reason}" for row in broken[:_MAX_SHOWN]]
    if len(broken) > _MAX_SHOWN:
        shown.append(f"  and {len(broken) - _MAX_SHOWN} more")
    if broken and on_error is OnError.stop:
        raise InvalidInputError(
            "data.path",
            path,
            "\n".join(
                [
                    f"{len(broken)} of {checked.num_rows} rows cannot be used:",
                    *shown,
                    "fix them, or skip them with data.on_error=skip",
                ]
            ),
        )
    if broken:
        log.warning("%s: skipped %d rows:\n%s", path, len(broken), "\n".join(shown))
        checked.skipped |= {row.index for row in broken}
    if checked.num_prompts == 0:
        raise InvalidInputError("data.path", path, "has no usable prompt")


def _other_remedy(column: str) -> str:
    return "" if column == "prompt" else ", or copy other columns with data.columns"


def _kind(value: Any) -> str | None:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case dict():
            return "an object"
        case [*items] if known := [item for item in items if item is not None]:
            return {
                "text": "a list of texts",
                "a number": "a list of numbers",
                "an object": "a list of objects",
            }.get(_kind(known[0]) or "", "a list")
        case _:
            return None


class ColumnTypes:
    """The Arrow types of columns seen row by row, for an output that must declare them at once."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._pa, self._pq = import_pyarrow("output.path", output)
        self._schema = self._pa.schema([])
        self._rows: list[dict[str, Any]] = []
        self._kinds: dict[str, tuple[str, str]] = {}  # column -> kind of value, and where it was

    def add(self, columns: dict[str, Any], where: str) -> None:
        """Widen the types so that they hold the values of the row at ``where`` too.

        Raises InvalidInputError for a value of another kind than the column's.
        """
        for name, value in columns.items():
            if (kind := _kind(value)) is None:
                continue
            first, first_where = self._kinds.setdefault(name, (kind, where))
            if kind != first:
                raise InvalidInputError(
                    "output.path", str(self._output),
                    f"column {name!r} is {first} in {first_where} and {kind} in {where}, and a "
                    f"Parquet column has one type: write .jsonl{_other_remedy(name)}",
                )  # fmt: skip
        self._rows.append(columns)
        if len(self._rows) == _ROWS_PER_MERGE:
            self._merge()

    def declare(self, there: Any, names: dict[str, str]) -> None:
        """Take the types from the schema ``there``; ``names`` maps a column here to one there.

        Raises InvalidInputError for a type that is read and cannot be written.
        """
        self._schema = self._pa.schema(
            [there.field(old).with_name(new) for new, old in names.items()]
        )
        for column in self._schema:
            try:
                self._pa.Table.from_pylist([], schema=self._pa.schema([column]))
            except (self._pa.ArrowException, NotImplementedError) as error:
                raise self._no_column(column.name, error) from None

    def schema(self) -> Any:
        """Raises InvalidInputError for values that make no Parquet column, as `add` does."""
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
                raise self._no_column(name, error) from None
        self._rows.clear()

    def _no_column(self, name: str, error: Exception) -> InvalidInputError:
        return InvalidInputError(
            "output.path",
            str(self._output),
            f"column {name!r} cannot be stored as Parquet ({error}): write "
            f".jsonl{_other_remedy(name)}",
        )
