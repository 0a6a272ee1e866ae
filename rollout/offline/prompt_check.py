"""Checks the rows of the prompts, as far as that takes no model."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
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
    file: PromptFile,
    on_error: OnError,
    output: Path,
    reserved: Collection[str],
    progress: Callable[[int], None] = lambda num_rows: None,
) -> CheckedPrompts:
    """Check every row of the file.

    Args:
        reserved: columns the output has of its own.
        progress: told how many rows are read, now and then.

    Raises InvalidInputError for broken rows, unless they are skipped, for a column that would be
    there twice, and for a file without prompts.
    """
    checked = CheckedPrompts(file=file)
    is_parquet = output.suffix == ".parquet"
    broken: list[BrokenRow] = []
    for row in file.rows():
        checked.num_rows += 1
        if checked.num_rows % _ROWS_PER_MERGE == 0:
            progress(checked.num_rows)
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
        if not is_parquet:
            _check_json(file, row)
    handle_broken(broken, checked, on_error)
    if is_parquet:
        checked.carried_schema = _parquet_schema(checked, output)
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


def _parquet_schema(checked: CheckedPrompts, output: Path) -> Any:
    """The Arrow schema of the columns that a Parquet output takes from the prompts.

    Raises InvalidInputError for a column that Parquet cannot hold.
    """
    pa, pq = import_pyarrow("output.path", output)

    def refusal(name: str, error: Exception) -> InvalidInputError:
        others = "" if name == "prompt" else ", or copy other columns with data.columns"
        return InvalidInputError(
            "output.path",
            str(output),
            f"column {name!r} cannot be stored as Parquet ({error}): write .jsonl{others}",
        )

    schema = pa.schema([])
    if checked.file.is_parquet:
        there, sources = checked.file.arrow_schema(), dict[str, str]()
        for row in checked.rows():
            sources |= {"prompt": row.prompt_column} | {name: name for name in row.extras}
        for name, source in sources.items():
            schema = schema.append(there.field(source).with_name(name))
            try:
                pa.Table.from_pylist([], schema=schema)  # some types are read and not written
            except (pa.ArrowException, NotImplementedError) as error:
                raise refusal(name, error) from None
        return schema
    rows = checked.rows()
    while group := [carried(row) for row in islice(rows, _ROWS_PER_MERGE)]:
        for name in dict.fromkeys(name for row in group for name in row):
            try:
                column = pa.schema([(name, pa.array([row.get(name) for row in group]).type)])
                schema = pa.unify_schemas([schema, column], promote_options="permissive")
                # Some types, such as that of {}, exist in Arrow and not in Parquet.
                pq.write_table(column.empty_table(), io.BytesIO())
            except (pa.ArrowException, OverflowError) as error:
                raise refusal(name, error) from None
    return schema
