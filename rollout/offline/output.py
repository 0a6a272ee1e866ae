"""One output file, and what stands beside it while it grows.

    <output>                 JSONL: the rollouts so far. Parquet: there only when complete
    <output>.partial.jsonl   Parquet only: the rollouts so far, until they are compacted
    <output>.run.json        what decides the content, and whether it is complete
    <output>.corpus          what the next drafts are made from; decides nothing, see job_corpus.py

`run.json` is written before the first rollout and again after the last; whatever moment the
process dies at, the three say what is done.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.learned_file import learned_file
from rollout.offline.arrow import read_json_rows, rollout_schema, write_parquet
from rollout.offline.config import OutputConfig
from rollout.offline.fingerprint import differences
from rollout.offline.prompts import PromptFile, PromptRow, carried
from rollout.offline.rows import rollout_columns, rollout_row, to_json_line
from rollout.offline.sink import JsonlSink, OutputError, whole_rows, write_whole
from rollout.types import Rollout, SamplingParams

log = logging.getLogger(__name__)

_REMEDY = "choose another output.path, or replace it with output.overwrite=true"


class RolloutOutput:
    """Opened under an OutputLock. Raises OutputError for a file that another run wrote."""

    def __init__(
        self,
        path: Path,
        config: OutputConfig,
        params: SamplingParams,
        fingerprint: dict[str, Any],
    ) -> None:
        self.path = path
        self.columns = rollout_columns(config, params)
        self._config = config
        self._n = params.n
        self._fingerprint = fingerprint
        self.corpus_path = path.with_name(path.name + ".corpus")
        self._record_path = path.with_name(path.name + ".run.json")
        self._is_parquet = path.suffix == ".parquet"
        self._journal = path.with_name(path.name + ".partial.jsonl") if self._is_parquet else path
        self._offsets = array("q")  # per (prompt, sample): where its row begins, -1 before it is
        self.num_done = 0
        self._sink: JsonlSink | None = None
        self._starts_anew = False
        self.completion = self._look()

    def _look(self) -> dict[str, int] | None:
        """How an earlier run of this very job completed the output; None when work is left."""
        if not self._record_path.exists():
            if self.path.exists() and self.path.stat().st_size and not self._config.overwrite:
                raise OutputError(
                    f"{self.path} exists and no {self._record_path.name} says that a job wrote it: "
                    f"{_REMEDY}"
                )
            self._starts_anew = True
            return None
        record = self._read_record()
        if changes := differences(record.get("fingerprint", {}), self._fingerprint):
            if not self._config.overwrite:
                raise OutputError(
                    f"{self.path} holds rollouts of another run: {'; '.join(changes)}. {_REMEDY}"
                )
            self._starts_anew = True
            return None
        completion = record.get("complete")
        if completion is None:
            return None
        if self._config.overwrite or not self.path.exists():
            self._starts_anew = True
            return None
        if self.path.stat().st_size == completion["bytes"]:
            if self._is_parquet:
                self._journal.unlink(missing_ok=True)  # the process died just before this
            return completion
        if self._is_parquet:
            raise OutputError(f"{self.path} was changed after it was completed: {_REMEDY}")
        return None  # rows were taken out or torn off: the scan finds which

    def _read_record(self) -> dict[str, Any]:
        try:
            return json.loads(self._record_path.read_bytes())
        except ValueError:
            if self._config.overwrite:
                return {}
            raise OutputError(f"{self._record_path} is not JSON: {_REMEDY}") from None

    def open(self, num_prompts: int) -> None:
        """Find what is done and make ready to append. ``num_prompts`` counts broken rows too."""
        num_slots = num_prompts * self._n
        if self._starts_anew:
            self._remove()
        try:
            end = self._scan(num_slots)
        except OutputError:
            if not self._config.overwrite:
                raise
            self._remove()
            end = self._scan(num_slots)
        self._write_record(None)
        self._sink = JsonlSink(self._journal, end, sync_seconds=self._config.sync_seconds)

    def _remove(self) -> None:
        learned = learned_file(self.corpus_path)
        for path in (self._record_path, self._journal, self.path, self.corpus_path, learned):
            path.unlink(missing_ok=True)

    def _scan(self, num_slots: int) -> int:
        """Note every whole row; the end of the last."""
        self._offsets = array("q", [-1]) * num_slots
        self.num_done = end = 0
        if not self._journal.exists():
            return end
        for start, after, row in whole_rows(self._journal):
            slot = self._slot(row.get("prompt_index", -1), row.get("sample_index", -1))
            if slot is None or self._offsets[slot] >= 0:
                raise OutputError(
                    f"{self._journal}: the row at byte {start} is no rollout of this run or is "
                    f"there twice: {_REMEDY}"
                )
            self._offsets[slot] = start
            self.num_done += 1
            end = after
        torn = self._journal.stat().st_size - end
        if torn:
            log.warning("cut off %d bytes of a rollout that was half written", torn)
        return end

    def _slot(self, prompt_index: int, sample_index: int) -> int | None:
        slot = prompt_index * self._n + sample_index
        inside = 0 <= sample_index < self._n and 0 <= slot < len(self._offsets)
        return slot if inside else None

    def has(self, prompt_index: int, sample_index: int) -> bool:
        return self._offsets[prompt_index * self._n + sample_index] >= 0

    def append(self, rollout: Rollout, prompt: PromptRow) -> None:
        assert self._sink is not None, "open() comes first"
        row = rollout_row(rollout, self.columns)
        if not self._is_parquet:  # there the compaction takes them from the prompts, types and all
            row |= carried(prompt)
        slot = self._slot(rollout.prompt_index, rollout.sample_index)
        assert slot is not None, "a rollout of no prompt"
        assert self._offsets[slot] < 0, "a rollout twice"
        self._offsets[slot] = self._sink.append(to_json_line(row))
        self.num_done += 1

    def finish(self, prompts: PromptFile, carried_schema: Any, num_skipped: int) -> None:
        """All rollouts are there: compact them to Parquet if so asked, and say so."""
        self.close()
        if self._is_parquet:
            schema = rollout_schema(self.columns, carried_schema)
            write_parquet(self.path, self._ordered_rows(prompts), schema)
        self._write_record(
            {
                "rollouts": self.num_done,
                "skipped_prompts": num_skipped,
                "bytes": self.path.stat().st_size,
            }
        )
        if self._is_parquet:
            self._journal.unlink()

    def _ordered_rows(self, prompts: PromptFile) -> Iterator[dict[str, Any]]:
        for prompt in prompts.rows():
            first = prompt.index * self._n
            offsets = [at for at in self._offsets[first : first + self._n] if at >= 0]
            for row in read_json_rows(self._journal, offsets):
                assert isinstance(prompt, PromptRow), "a rollout of a broken row"
                yield row | carried(prompt)

    def close(self) -> None:
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.close()

    def _write_record(self, complete: dict[str, int] | None) -> None:
        record = {"format": 1, "complete": complete, "fingerprint": self._fingerprint}
        write_whole(self._record_path, json.dumps(record, indent=2).encode() + b"\n")
