"""Real text as tokens, without a tokenizer: words, runs of white space and symbols, numbered in the
order they first come."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_PIECE = re.compile(r"\w+|\s+|[^\w\s]")


def real_text(files: list[Path], num_tokens: int) -> list[NDArray[np.int32]]:
    """A document per file, cut off after so many tokens in all; without files, the source of
    Python's standard library."""
    if not files:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        files += sorted(Path(sysconfig.get_path("stdlib")).glob("[a-r]*/*.py"))
    numbers: dict[str, int] = {}
    documents: list[NDArray[np.int32]] = []
    left = num_tokens
    for file in files:
        if left <= 0:
            break
        pieces = _PIECE.findall(file.read_text(encoding="utf-8", errors="replace"))[:left]
        documents.append(
            np.array([numbers.setdefault(piece, len(numbers)) for piece in pieces], np.int32)
        )
        left -= len(pieces)
    return documents
