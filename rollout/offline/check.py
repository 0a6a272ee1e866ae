"""Checks every prompt before any is generated from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.offline.arrow import ColumnTypes
from rollout.offline.config import OnError
from rollout.offline.prompts import BrokenRow, PromptFile, PromptRow, carried
from rollout.offline.rows import to_json_line
from rollout.types import Prompt, SamplingParams

log = logging.getLogger(__name__)

_MAX_SHOWN = 10


@dataclass(kw_only=True, slots=True)
class CheckedPrompts:
    """A prompts file all of whose rows are known to be good, or to be skipped."""

    file: PromptFile
    num_rows: int = 0  # broken ones included
    skipped: set[int] = field(default_factory=set)
    carried_schema: Any = None  # of prompt and extra columns; only where the output is Parquet

    @property
    def num_prompts(self) -> int:
        return self.num_rows - len(self.skipped)

    def rows(self) -> Iterator[PromptRow]:
        for row in self.file.rows():
            if isinstance(row, PromptRow) and row.index not in self.skipped:
                yield row


def check_rows(
    file: PromptFile, on_error: OnError, output: Path, reserved: Collection[str]
) -> CheckedPrompts:
    """Check what can be told without the model. ``reserved`` are columns the output has of its own.

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
                "rename them, or choose those to carry through with data.columns",
            )
        if types is not None:
            sources |= {"prompt": row.prompt_column} | {name: name for name in row.extras}
            if not file.is_parquet:
                types.add(carried(row))
        else:
            _check_json(file, row)
    _handle(broken, checked, on_error)
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
                f"{row.where}, column {name!r}: {error}; leave it out with data.columns",
            ) from None


def check_tokens(
    checked: CheckedPrompts, engine: Engine, params: SamplingParams, on_error: OnError
) -> None:
    """Check what takes a tokenizer and the sizes of model and memory. Raises as `check_rows`
    does."""
    broken = []
    for row in checked.rows():
        try:
            _check_prompt(engine, row.prompt, params)
        except OutOfMemoryError as error:
            # Never skipped: the output must not depend on how much memory was free.
            raise OutOfMemoryError(f"{row.where}: {error}") from error
        except InvalidInputError as error:
            if error.field.startswith("sampling."):
                raise
            broken.append(BrokenRow(row.index, row.where, str(error)))
    _handle(broken, checked, on_error)


def _check_prompt(engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """Raises what submitting the prompt would; computes nothing.

    The engine would end a rollout where the KV slots do. A job refuses to begin: its output must
    not depend on how much memory was free.
    """
    prompt_len = engine.check(prompt, params)
    needed = min(prompt_len + params.max_new_tokens, engine.max_context_len)
    slots = engine.max_sequence_len
    if needed > slots:
        raise OutOfMemoryError(
            f"prompt of {prompt_len} tokens, with what may be generated, needs {needed} KV "
            f"slots and there are {slots}: raise memory.kv_bytes or memory.max_kv_tokens, or lower "
            "sampling.max_new_tokens"
        )


def _handle(broken: list[BrokenRow], checked: CheckedPrompts, on_error: OnError) -> None:
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
                    "mend them, or skip them with data.on_error=skip",
                ]
            ),
        )
    if broken:
        log.warning("%s: skipped %d rows:\n%s", path, len(broken), "\n".join(shown))
        checked.skipped |= {row.index for row in broken}
    if checked.num_prompts == 0:
        raise InvalidInputError("data.path", path, "holds no prompt that could be used")
