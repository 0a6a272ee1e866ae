"""8 to 1,024 replicas on paper: idle time in the tail, corpus traffic, weight broadcasts.

A discrete-event simulation with the cluster's own router. Lengths of rollouts are recorded ones, or
from a distribution fitted to such; what a step costs is computed from a model's size and a memory's
speed (`scale_sim/hardware.py`), not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from plots import add_plot_option
from rich.console import Console
from rich.table import Table
from scale_sim.broadcast import Shape, best_bucket, broadcast_seconds
from scale_sim.hardware import LLAMA_8B
from scale_sim.lengths import GroupSampler, fitted, recorded
from scale_sim.plot import plot
from scale_sim.rollouts import Policy, Simulation, Workload
from scale_sim.traffic import FanOut, traffic

Rows = list[dict[str, Any]]

MODELS = {"8B": 16.06e9, "32B": 65.5e9}  # bytes in bfloat16
LINKS = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}  # bytes/s
REPLICAS_PER_HOST = 8


def tail_rows(options: argparse.Namespace, lengths: GroupSampler) -> Iterator[dict[str, Any]]:
    """Weak scaling: the work grows with the cluster. Strong scaling: it is that of 64 replicas."""
    for scaling in ("weak", "strong"):
        for num_replicas in options.replicas:
            scale = num_replicas if scaling == "weak" else 64
            work = Workload(groups_per_step=max(1, options.groups * scale), samples=options.samples)
            for policy in Policy if scaling == "weak" else [Policy.SYNCHRONOUS, Policy.STREAMING]:
                for speculates in (False, True):
                    outcome = Simulation(
                        num_replicas, work, LLAMA_8B, lengths,
                        policy=policy, speculates=speculates, seed=options.seed,
                    ).run()  # fmt: skip
                    yield {
                        "scaling": scaling,
                        "replicas": num_replicas,
                        "policy": policy.value,
                        "speculation": speculates,
                        "step_seconds": outcome.seconds,
                        "idle": outcome.idle,
                        "empty_seats": outcome.empty_seats,
                        "tail": outcome.tail,
                        "tokens_per_second": outcome.tokens_per_second,
                        "stale": outcome.stale,
                        "spread": outcome.spread,
                    }


def traffic_rows(tails: Rows) -> Iterator[dict[str, Any]]:
    """At the rate of the streaming policy, where replicas are busiest."""
    for tail in tails:
        wanted = ("weak", Policy.STREAMING.value, True)
        if (tail["scaling"], tail["policy"], tail["speculation"]) != wanted:
            continue
        for fan_out in FanOut:
            found = traffic(
                fan_out,
                tail["replicas"],
                tail["tokens_per_second"],
                (1 - tail["empty_seats"]) * Workload.__dataclass_fields__["seats"].default,
                tail["spread"],
            )
            yield {
                "replicas": tail["replicas"],
                "fan_out": fan_out.value,
                "received_per_replica": found.received_per_replica,
                "total": found.total,
                "core_share": found.core_share,
                "seconds_held": found.seconds_held,
            }


def broadcast_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model, num_bytes in MODELS.items():
        for link, speed in LINKS.items():
            for num_replicas in options.replicas:
                hosts = -(-num_replicas // REPLICAS_PER_HOST)
                for shape in Shape:
                    bucket, best = best_bucket(shape, hosts, num_bytes, speed)
                    yield {
                        "model": model,
                        "link": link,
                        "replicas": num_replicas,
                        "hosts": hosts,
                        "shape": shape.value,
                        "seconds": broadcast_seconds(shape, hosts, num_bytes, speed),
                        "best_bucket_bytes": bucket,
                        "best_seconds": best,
                    }


def show(title: str, rows: Rows) -> None:
    if not rows:
        return
    table = Table(*rows[0], title=title)
    for entry in rows:
        table.add_row(*(_shown(value) for value in entry.values()))
    Console(width=150).print(table)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trace", type=Path,
                           help="lengths: a trace (.npz) or a job's rollouts (.jsonl); default: a "
                           "fitted distribution")  # fmt: skip
    arguments.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256, 1024])
    arguments.add_argument("--groups", type=int, default=16, help="per replica and step")
    arguments.add_argument("--samples", type=int, default=8, help="per group")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", choices=["tail", "broadcast"], help="default: all")
    arguments.add_argument("--json", type=Path, help="also write the tables to this file")
    add_plot_option(arguments)
    options = arguments.parse_args()
    lengths = fitted if options.trace is None else recorded(options.trace)
    drawn = np.concatenate([lengths(np.random.default_rng(i), options.samples) for i in range(999)])
    print(f"lengths: mean {drawn.mean():.0f}, median {np.median(drawn):.0f}, max {drawn.max()}")
    tails = [] if options.only == "broadcast" else list(tail_rows(options, lengths))
    tables = {
        "tail": tails,
        "traffic": list(traffic_rows(tails)),
        "broadcast": [] if options.only == "tail" else list(broadcast_rows(options)),
    }
    for title, rows in tables.items():
        show(title, rows)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(tables, indent=1) + "\n")
    if options.plot is not None:
        plot(tables, options.plot)


if __name__ == "__main__":
    main()
