"""The n-gram corpus by itself: what it costs, what it holds, how well it drafts, beside its peers.

    python benchmarks/bench_corpus.py [--trace FILE ...] [--quick] [--json FILE] [--plot FILE]

Traces are recorded rollouts (see `traces.load_trace`); without one, one is made up. Times are CPU
times with Python's garbage collector off, except where wall time is what counts: while another
thread removes a corpus, and for the disk. Peers that are not installed are skipped, with a line
saying so.
"""

from __future__ import annotations

import time
from pathlib import Path

from corpus_bench.external import external_rows
from corpus_bench.insertion import insertion_rows
from corpus_bench.latency import latency_rows
from corpus_bench.memory import memory_rows
from corpus_bench.pathological import pathological_rows
from corpus_bench.persistence import persistence_rows
from corpus_bench.proposing import proposing_rows
from corpus_bench.quality import accept_rows, precision_rows
from corpus_bench.settings import Settings
from plots import plot_replays
from replay import add_replay_options
from replaying import Replay
from table import Row, finish, parser
from traces import load_traces

ROWS = {
    "insert": insertion_rows,
    "memory": memory_rows,
    "external": external_rows,
    "propose": proposing_rows,
    "pathological": pathological_rows,
    "latency": latency_rows,
    "persistence": persistence_rows,
}
REPLAYS = {"accept": accept_rows, "precision": precision_rows}
PARTS = [*ROWS, *REPLAYS]


def main() -> None:
    arguments = parser(__doc__)
    add_replay_options(arguments)
    arguments.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    arguments.add_argument(
        "--floor", type=float, default=0.06, help="least estimate of a node, for accept length"
    )
    arguments.add_argument(
        "--external-text",
        type=Path,
        action="append",
        default=[],
        help="a document of the external corpus (repeatable; default: the standard library)",
    )
    arguments.add_argument("--quick", action="store_true", help="fewer tokens, under a minute")
    options = arguments.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        arguments.error(f"PART={unknown[0]!r}: must be one of {', '.join(PARTS)}")
    parts = options.parts or PARTS
    if options.plot is not None and not set(parts) & set(REPLAYS):
        arguments.error(f"--plot: needs one of the parts {', '.join(REPLAYS)}")
    settings = Settings(
        traces=load_traces(options.trace, options.seed),
        external_text=options.external_text,
        budget=options.budget,
        active=options.active,
        floor=options.floor,
        seed=options.seed,
        quick=options.quick,
    )
    rows: list[Row] = []
    pictures: list[Replay] = []
    for part in parts:
        start = time.perf_counter()
        if part in ROWS:
            rows += ROWS[part](settings)
        else:
            added, results = REPLAYS[part](settings)
            rows += added
            pictures += results
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    if options.plot is not None:
        plot_replays(pictures, options.plot)
    finish("n-gram corpus", rows, options.json)


if __name__ == "__main__":
    main()
