"""What every part is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from traces import Trace


@dataclass(kw_only=True, slots=True)
class Settings:
    traces: list[Trace]
    external_text: list[Path]  # documents of the external corpus; empty: the standard library
    budget: int  # draft nodes per request
    active: int  # sequences of a batch
    floor: float  # least estimate of a node, where accept length is measured
    seed: int
    quick: bool

    @property
    def longest_trace(self) -> Trace:
        return max(self.traces, key=lambda trace: trace.num_tokens)
