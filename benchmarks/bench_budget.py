"""The draft budget: never slower than plain decoding, and faster where drafts pay.

Engines that decode the same work take turns of a fraction of a second and must emit the same
tokens; a speedup is the median over the repeats.

Traces are replayed under a roofline's prices: those of --trace, and one sampled from the model at
temperature 1, which is kept in runs/ and made when it is missing. Of the budget a replay has the
choice of nodes and what the corpus is told of the verified; not the gate, the hysteresis, the
learned corrections or the time that drafting takes.

    python benchmarks/bench_budget.py --trace rollouts.npz=2.1 --only replay
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from budget_bench.decoding import decoding_rows, workloads
from budget_bench.grpo_step import NAME as GRPO_STEP
from budget_bench.grpo_step import grpo_rows
from budget_bench.replays import replay_rows
from budget_bench.traces_with_bars import BarredTrace, barred_trace
from sample_trace import nats_per_token, sample_trace
from table import Row, finish, parser
from traces import synthetic_trace

SAMPLED = BarredTrace(path=Path("runs/sampled_temperature_1.npz"), bar=1.0)


def replay_sampled(model: Path) -> list[Row]:
    if not SAMPLED.path.exists():
        sample_trace(model, SAMPLED.path)
    print(f"{SAMPLED.path}: {nats_per_token(SAMPLED.path):.2f} nats a token", flush=True)
    return replay_rows(SAMPLED.load(), SAMPLED.bar)


def replay_given(trace: BarredTrace) -> list[Row]:
    return replay_rows(trace.load(), trace.bar)


def parts(options: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    """By name, in order; --only picks among the names."""
    found: dict[str, Callable[[], list[Row]]] = {}
    for work in workloads():
        found[work.name] = partial(decoding_rows, options.model, work, options.repeats)
    found[GRPO_STEP] = partial(grpo_rows, options.model, options.repeats)
    for given in options.trace:
        found[f"replay of {given.path.stem}"] = partial(replay_given, given)
    if not options.trace:
        found["replay of synthetic"] = lambda: replay_rows(synthetic_trace(), None)
    found[f"replay of {SAMPLED.path.stem}"] = partial(replay_sampled, options.model)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=3, help="pairs the median is taken of")
    arguments.add_argument("--only", default="", help="run the parts whose name contains this")
    arguments.add_argument(
        "--trace",
        type=barred_trace,
        action="append",
        default=[],
        metavar="FILE[=BAR]",
        help="recorded rollouts to replay, with the least speedup that is good (repeatable; "
        "default: a made-up trace, without a bar)",
    )
    options = arguments.parse_args()
    if options.repeats < 1:
        arguments.error(f"--repeats={options.repeats}: must be >= 1")
    torch.set_num_threads(options.threads)
    known = parts(options)
    chosen = {name: part for name, part in known.items() if options.only in name}
    if not chosen:
        arguments.error(f"--only={options.only!r}: must be part of one of: {'; '.join(known)}")
    rows: list[Row] = []
    for name, part in chosen.items():
        started = time.perf_counter()
        rows += part()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    finish(f"draft budget, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
