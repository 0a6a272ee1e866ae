"""Bytes of a source file that are replaced by others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    operator: str
    start: int  # bytes
    end: int
    replacement: bytes
    line: int  # from 1, where it starts
    statement: tuple[int, int]  # the first and the last line of the statement it is in
