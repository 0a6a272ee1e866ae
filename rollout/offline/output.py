"""One output file, its lock and record, and the files beside it while it grows; see paths.py."""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from filelock import FileLock, Timeout

from rollout.errors import OutputError
from rollout.offline.config import OutputConfig
from rollout.offline.fingerprint import differences
from rollout.offline.journal import Journal, cannot_write, whole_rows, write_whole
from rollout.offline.output_rows import (
    RowCheck,
    read_json_rows,
    rollout_columns,
    rollout_row,
    rollout_schema,
    to_json_line,
    write_parquet,
)
from rollout.offline.paths import JobPaths, lock_file
from rollout.offline.prompt_check import CheckedPrompts
from rollout.offline.prompts import PromptRow, carried
from rollout.sampling.seeds import as_int64
from rollout.types import Rollout, SamplingParams

REMEDY = "choose another output.path, or replace it with output.overwrite=true"

_Count = Annotated[int, msgspec.Meta(ge=0)]


@contextmanager
def output_lock(output: Path) -> Iterator[None]:
    """Hold `<output>.lock`: one process writes one output. The system frees it with the process.

    Raises OutputError, which names the other process, where it is held.
    """
    path = lock_file(output)
    lock = FileLock(path, timeout=0.1)  # which holds one more try: its holder may just remove it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        owner = ""
        with suppress(OSError):  # it may just have ended
            owner = path.read_text(errors="replace")[:20]
        raise OutputError(
            f"{output} is being written by another job (process {owner or 'unknown'}): wait for "
            "it, or choose another output.path"
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        with suppress(OSError):  # then others are refused without it
            path.write_text(str(os.getpid()))
        yield
    finally:
        with suppress(OSError):  # a file without a lock does no harm
            path.unlink(missing_ok=True)
        lock.release()


class CompletedOutput(msgspec.Struct, frozen=True):
    """The content of an output when it was complete."""

    rollouts: _Count
    skipped_prompts: _Count
    num_bytes: _Count = msgspec.field(name="bytes")


class RunRecord(msgspec.Struct, frozen=True):
    """`<output>.run.json`: what decides the output's content, and whether it is complete."""

    fingerprint: Annotated[dict[str, Any], msgspec.Meta(min_length=1)]
    complete: CompletedOutput | None = None
    format: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Raises OutputError for what is no such record."""
        try:
            return msgspec.convert(json.loads(path.read_bytes()), cls)
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            raise OutputError(f"{path} is not the record of a run ({error}): {REMEDY}") from None

    def write(self, path: Path) -> None:
        """Write the record to a file, whole or not at all. Raises OutputError."""
        write_whole(path, json.dumps(msgspec.to_builtins(self), indent=2).encode() + b"\n")


log = logging.getLogger(__name__)


class RolloutOutput:
    """The output of a job, opened under an `output_lock`.

    Raises OutputError for a file that another run wrote.
    """

    def __init__(
        self,
        paths: JobPaths,
        config: OutputConfig,
        params: SamplingParams,
        fingerprint: dict[str, Any],
    ) -> None:
        self.columns = rollout_columns(config, params)
        self._paths = paths
        self._overwrite = config.overwrite
        self._sync_seconds = config.sync_seconds
        self._n = params.n
        self._fingerprint = fingerprint
        self._offsets = array("q")  # per (prompt, sample): where its row begins, -1 before it is
        self.num_done = 0
        self._journal: Journal | None = None
        self._starts_anew = False
        self.completion = self._look()

    def _look(self) -> CompletedOutput | None:
        """The completion record of an earlier run of this very job; None when work is left."""
        output, journal = self._paths.output, self._paths.journal
        if not self._paths.record.exists():
            for path in (output, journal):
                if path.exists() and path.stat().st_size and not self._overwrite:
                    raise OutputError(
                        f"{path} exists and no {self._paths.record.name} says that a job wrote it: "
                        f"{REMEDY}"
                    )
            self._starts_anew = True
            return None
        try:
            record = RunRecord.read(self._paths.record)
        except OutputError:
            if not self._overwrite:
                raise
            self._starts_anew = True
            return None
        if changes := differences(record.fingerprint, self._fingerprint):
            if not self._overwrite:
                raise OutputError(
                    f"{output} holds rollouts of another run: {'; '.join(changes)}. {REMEDY}"
                )
            self._starts_anew = True
            return None
        if record.complete is None:
            return None
        if self._overwrite or not output.exists():
            self._starts_anew = True
            return None
        if output.stat().st_size == record.complete.num_bytes:
            if self._paths.is_parquet:
                self._remove_journal()  # the process died just before this
            return record.complete
        if self._paths.is_parquet:
            raise OutputError(f"{output} was changed after it was completed: {REMEDY}")
        return None  # rows were taken out or torn off: the scan finds which

    def open(self, prompts: CheckedPrompts) -> None:
        """Find what is done and make ready to append."""
        if self._starts_anew:
            self._remove()
        try:
            end = self._scan(prompts)
        except OutputError:
            if not self._overwrite:
                raise
            self._remove()
            end = self._scan(prompts)
        RunRecord(self._fingerprint).write(self._paths.record)
        self._journal = Journal(self._paths.journal, end, sync_seconds=self._sync_seconds)

    def _remove(self) -> None:
        paths = self._paths
        for path in (paths.record, paths.journal, paths.output, paths.corpus, paths.learned):
            path.unlink(missing_ok=True)

    def _scan(self, prompts: CheckedPrompts) -> int:
        self._offsets = array("q", [-1]) * (prompts.num_rows * self._n)
        self.num_done = end = 0
        journal = self._paths.journal
        if not journal.exists():
            return end
        check = RowCheck(self.columns)
        for start, after, row in whole_rows(journal):
            reason = check.fault(row) or self._key_fault(row, prompts)
            if reason is not None:
                raise OutputError(
                    f"{journal}: the row at byte {start} {reason}: take that line out, and the "
                    f"rollout is made again; or {REMEDY}"
                )
            self._offsets[self._slot(row["prompt_index"], row["sample_index"])] = start
            self.num_done += 1
            end = after
        torn = journal.stat().st_size - end
        if torn:
            log.warning("cut off %d bytes of a rollout that was half written", torn)
        return end

    def _key_fault(self, row: dict[str, Any], prompts: CheckedPrompts) -> str | None:
        prompt, sample = row["prompt_index"], row["sample_index"]
        if not (prompt < prompts.num_rows and sample < self._n) or prompt in prompts.skipped:
            return "is no rollout of this run"
        return "is there twice" if self._offsets[self._slot(prompt, sample)] >= 0 else None

    def _slot(self, prompt_index: int, sample_index: int) -> int:
        return prompt_index * self._n + sample_index

    def has(self, prompt_index: int, sample_index: int) -> bool:
        """Whether the row of that sample has been written."""
        return self._offsets[self._slot(prompt_index, sample_index)] >= 0

    def append(self, rollout: Rollout, prompt: PromptRow) -> None:
        """Write a rollout durably. Raises OutputError where it cannot be."""
        assert self._journal is not None, "open() comes first"
        row = rollout_row(rollout, self.columns)
        if not self._paths.is_parquet:  # there finish() takes them from the prompts, types and all
            row |= carried(prompt)
        slot = self._slot(rollout.prompt_index, rollout.sample_index)
        assert self._offsets[slot] < 0, "a rollout twice"
        self._offsets[slot] = self._journal.append(to_json_line(row))
        self.num_done += 1

    def finish(self, prompts: CheckedPrompts) -> None:
        """Mark the output as complete, as Parquet if so asked. Raises OutputError if rollouts are
        missing."""
        self.close()
        output, total = self._paths.output, prompts.num_prompts * self._n
        if self.num_done != total:
            raise OutputError(
                f"{self._paths.journal} holds {self.num_done} of {total} rollouts: run the same "
                "command again to go on"
            )
        if self._paths.is_parquet:
            schema = rollout_schema(self.columns, prompts.carried_schema)
            write_parquet(output, self._ordered_rows(prompts), schema)
        complete = CompletedOutput(self.num_done, len(prompts.skipped), output.stat().st_size)
        RunRecord(self._fingerprint, complete).write(self._paths.record)
        if self._paths.is_parquet:
            self._remove_journal()

    def _remove_journal(self) -> None:
        try:
            self._paths.journal.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s is of no use any more and stays: %s", self._paths.journal, error)

    def _ordered_rows(self, prompts: CheckedPrompts) -> Iterator[dict[str, Any]]:
        for prompt in prompts.rows():
            first = self._slot(prompt.index, 0)
            for row in read_json_rows(self._paths.journal, self._offsets[first : first + self._n]):
                row["seed"] = as_int64(row["seed"])  # outputs may have it unsigned
                yield row | carried(prompt)

    def close(self) -> None:
        """Raises OutputError where rows that were written are not safe."""
        if self._journal is not None:
            journal, self._journal = self._journal, None
            journal.close()
