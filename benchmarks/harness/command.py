"""The command line of a benchmark: its options, its parts, and the table at the end.

    command = Command(__doc__)
    command.model()
    command.option("--tokens", 96, quick=4, help="of a rollout")
    command.run("weight updates", parts)

Every benchmark takes `--json FILE`, `--only PART` and `--quick`, the smallest size that still runs
all of it: options with a quick default take that one unless they are given.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness.rows import Row, append_record, show

Part = Callable[[], Iterable[Row]]
Parts = Mapping[str, Part]


def parts_of(
    rows: Mapping[str, Callable[[argparse.Namespace], Iterable[Row]]],
) -> Callable[[argparse.Namespace], Parts]:
    """The parts of a benchmark that hands its options to each."""
    return lambda options: {name: partial(each, options) for name, each in rows.items()}


class Command:
    def __init__(self, description: str | None) -> None:
        self._parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._defaults: dict[str, tuple[Any, Any]] = {}  # usual and quick, by key
        self.option("--json", type=Path, metavar="FILE",
                    help="append the rows to JSON lines, each as it comes")  # fmt: skip
        self.option("--only", [], nargs="+", metavar="PART",
                    help="parts whose name contains one of these; default: all")  # fmt: skip
        self.flag("--quick", "the smallest size that runs all of it")

    def option(
        self,
        name: str,
        default: Any = None,
        *,
        quick: Any = None,
        help: str = "",
        **settings: Any,
    ) -> None:
        """Add an option of its default's type.

        Args:
            quick: The default of a quick run; None: the usual one.
            settings: More of argparse's.
        """
        sample = default[0] if isinstance(default, list) and default else default
        if sample not in (None, []) and not isinstance(sample, bool):
            settings.setdefault("type", type(sample))
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            help = f"{help}; default: {shown}".removeprefix("; ")
        self._parser.add_argument(name, default=argparse.SUPPRESS, help=help, **settings)
        key = name.removeprefix("--").replace("-", "_")
        self._defaults[key] = (default, default if quick is None else quick)

    def flag(self, name: str, help: str) -> None:
        self._parser.add_argument(name, action="store_true", help=help)

    def model(self) -> None:
        self.option("--model", Path("models/SmolLM2-135M-Instruct"), type=Path, help="the target")

    def repeats(self, default: int) -> None:
        help = "measurements that the median is taken of"
        self.option("--repeats", default, quick=1, help=help)

    def threads(self, default: int) -> None:
        """Add `--threads`, which torch is told before anything runs."""
        self.option("--threads", default, help="of each process")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        options = self._parser.parse_args(arguments)
        for key, (usual, quick) in self._defaults.items():
            if key not in options:
                setattr(options, key, copy.copy(quick if options.quick else usual))
        return options

    def run(
        self,
        title: str,
        parts: Callable[[argparse.Namespace], Parts],
        arguments: Sequence[str] | None = None,
    ) -> None:
        """Run the parts that were asked for; a row counts as soon as its part yields it.

        Args:
            title: Of the table; ``{threads}`` and the like stand for options.
            parts: By name, in order. FileNotFoundError is reported as a fault of the command line.
        """
        options = self.parse(arguments)
        if "threads" in options:
            os.environ["OMP_NUM_THREADS"] = str(options.threads)  # engines choose no other number
            torch.set_num_threads(options.threads)
        try:
            known = parts(options)
        except FileNotFoundError as error:
            self._parser.error(str(error))
        chosen = {
            name: part
            for name, part in known.items()
            if not options.only or any(each in name for each in options.only)
        }
        if not chosen:
            self._parser.error(
                f"--only {' '.join(options.only)}: must be in one of: {'; '.join(known)}"
            )
        rows: list[Row] = []
        try:
            for name, part in chosen.items():
                started = time.perf_counter()
                for row in part():
                    rows.append(row)
                    if options.json is not None:
                        append_record(options.json, asdict(row))
                print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        finally:
            show(title.format_map(vars(options)), rows)
