"""Traces named on the command line, with what is expected of them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from traces import Trace, load_trace


@dataclass(kw_only=True, slots=True)
class BarredTrace:
    path: Path
    bar: float | None = None  # least speedup

    def load(self) -> Trace:
        """Raises SystemExit naming the option when the file is none that `load_trace` reads."""
        try:
            return load_trace(self.path)
        except (OSError, KeyError, ValueError) as error:
            raise SystemExit(
                f"--trace={self.path}: {error}; must be an .npz as traces.load_trace describes"
            ) from error


def barred_trace(value: str) -> BarredTrace:
    """Parse FILE or FILE=BAR."""
    path, equals, bar = value.rpartition("=")
    if not equals:
        return BarredTrace(path=Path(value))
    try:
        return BarredTrace(path=Path(path), bar=float(bar))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{value!r}: after '=' must come the least speedup, a number"
        ) from None
