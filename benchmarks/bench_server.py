"""The server beside the engine it serves, and what careless clients do to it.

    python benchmarks/bench_server.py [--only overhead|clients|malformed] [--json FILE]

overhead: the same requests offline, in one call, by a client per sample, and streamed.
clients: 500 at once, some slow to read, some gone before the end.
malformed: 10,000 requests that are wrong in two dozen ways.
"""

from __future__ import annotations

from pathlib import Path

import torch
from server_bench.malformed_run import malformed_requests
from server_bench.many_clients import many_clients
from server_bench.overhead import overhead
from table import Row, finish, parser

PARTS = ("overhead", "clients", "malformed")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=PARTS)
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument("--spec", default="none", help="of the overhead (default: %(default)s)")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--malformed", type=int, default=10_000, metavar="COUNT")
    arguments.add_argument("--seed", type=int, default=0, help="of the malformed requests")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    if options.only in (None, "overhead"):
        rows += overhead(options.model, options.spec, options.threads)
    if options.only in (None, "clients"):
        rows += many_clients(options.model, options.threads)
    if options.only in (None, "malformed"):
        rows += malformed_requests(options.model, options.malformed, options.seed, options.threads)
    finish(f"server, {options.model.name}, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
