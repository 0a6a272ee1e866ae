"""The run record beside an output: what decides its content, and whether it is complete."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.offline.sink import OutputError, write_whole

REMEDY = "choose another output.path, or replace it with output.overwrite=true"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Completion:
    rollouts: int
    skipped_prompts: int
    num_bytes: int  # of the output

    def __post_init__(self) -> None:
        for value in (self.rollouts, self.skipped_prompts, self.num_bytes):
            if type(value) is not int or value < 0:  # bool is an int too
                raise ValueError("complete must hold counts")


@dataclass(frozen=True, slots=True)
class RunRecord:
    fingerprint: dict[str, Any]
    complete: Completion | None = None

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Raises OutputError for what is no such record."""
        try:
            return cls._parse(json.loads(path.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise OutputError(f"{path} is not the record of a run ({error}): {REMEDY}") from None

    @classmethod
    def _parse(cls, record: Any) -> RunRecord:
        if not isinstance(record, dict):
            raise ValueError("it must be an object")
        if (number := record.get("format")) != _FORMAT:
            raise ValueError(f"it has format {number!r}, and {_FORMAT} is known here")
        fingerprint, complete = record.get("fingerprint"), record.get("complete")
        if not isinstance(fingerprint, dict) or not fingerprint:
            raise ValueError("its fingerprint must be an object")
        if complete is None:
            return cls(fingerprint)
        if not isinstance(complete, dict):
            raise ValueError("its complete must be null or an object")
        names = ("rollouts", "skipped_prompts", "bytes")
        counts: list[Any] = [complete.get(name) for name in names]  # Completion checks them
        return cls(fingerprint, Completion(*counts))

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises OutputError."""
        complete = self.complete and {
            "rollouts": self.complete.rollouts,
            "skipped_prompts": self.complete.skipped_prompts,
            "bytes": self.complete.num_bytes,
        }
        record = {"format": _FORMAT, "complete": complete, "fingerprint": self.fingerprint}
        write_whole(path, json.dumps(record, indent=2).encode() + b"\n")
