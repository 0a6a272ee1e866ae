"""Targets with recurrent layers: the memory of their states, verification, accept lengths.

Models are of random weights, and on the CPU. Accept lengths are those of the n-gram corpus on
recorded rollouts: the tokens are forced to the recorded ones, on a hybrid and on a dense model.

    python benchmarks/bench_hybrid.py --trace rollouts.npz
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from hybrid_bench.accept_length import accept_rows
from hybrid_bench.state_memory import state_memory_rows
from hybrid_bench.verify_cost import verify_rows
from table import Row, finish, parser
from traces import load_traces


def parts(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], list[Row]]]:
    """By name, in order; --only picks among the names."""
    found: dict[str, Callable[[], list[Row]]] = {
        "states": partial(state_memory_rows, folder / "states"),
        "verify": partial(verify_rows, folder / "verify", options.repeats),
    }
    for trace in load_traces(options.trace):
        found[f"accept length on {trace.name}"] = partial(
            accept_rows, folder / trace.name, trace, options.steps or None
        )
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter
    arguments.add_argument(
        "--trace", type=Path, action="append", default=[], metavar="FILE",
        help="recorded rollouts (repeatable; default: a made-up trace)",
    )  # fmt: skip
    arguments.add_argument("--steps", type=int, default=2, help="of each trace; 0: all")
    arguments.add_argument("--repeats", type=int, default=15, help="pairs the median is taken of")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--only", default="", help="run the parts whose name contains this")
    options = arguments.parse_args()
    if options.repeats < 1:
        arguments.error(f"--repeats={options.repeats}: must be >= 1")
    if options.steps < 0:
        arguments.error(f"--steps={options.steps}: must be >= 1, or 0 for all")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        known = parts(options, Path(folder))
        chosen = {name: part for name, part in known.items() if options.only in name}
        if not chosen:
            arguments.error(f"--only={options.only!r}: part of one of: {'; '.join(known)}")
        rows: list[Row] = []
        for name, part in chosen.items():
            started = time.perf_counter()
            rows += part()
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    finish(f"hybrid targets, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
