"""The three tables as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def plot(tables: Mapping[str, Rows], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.5), layout="constrained")
    tail, traffic, broadcast = figure.subplots(1, 3)
    _lines(
        tail,
        [row for row in tables["tail"] if row["scaling"] == "weak"],
        "idle",
        lambda row: f"{row['policy']}{', speculation' if row['speculation'] else ''}",
    )
    tail.set(title="idle share of replicas", xlabel="replicas", ylim=(0, None))
    _lines(traffic, tables["traffic"], "received_per_replica", lambda row: row["fan_out"])
    traffic.set(title="corpus, received by a replica (bytes/s)", xlabel="replicas", yscale="log")
    _lines(
        broadcast,
        [row for row in tables["broadcast"] if row["link"].startswith("400")],
        "best_seconds",
        lambda row: f"{row['model']}, {row['shape']}",
    )
    broadcast.set(title="weights, 400 Gbit/s (s)", xlabel="replicas", yscale="log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _lines(axes: Any, rows: Rows, value: str, label: Any) -> None:
    for name in dict.fromkeys(map(label, rows)):
        own = [row for row in rows if label(row) == name]
        axes.plot(
            [row["replicas"] for row in own], [row[value] for row in own], marker="o", label=name
        )
    axes.set_xscale("log", base=2)
    if rows:
        axes.legend(fontsize="small")
