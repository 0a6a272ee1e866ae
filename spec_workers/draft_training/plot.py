"""The plot of a training run, drawn from its log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollout.report.plots.canvas import LIGHT, Theme, legend_beside, render, time_unit
from spec_workers.draft_training.training_log import Record, read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT = "training.png"


def plot_training(log: Path, plot: Path) -> None:
    """Raises InvalidInputError where matplotlib is missing or the log cannot be read."""
    records = read_log(log)
    plot.write_bytes(render(lambda figure, theme: _draw(figure, theme, records), LIGHT, (8.0, 6.0)))


def _draw(figure: Figure, theme: Theme, records: list[Record]) -> None:
    steps = [record for record in records if record["event"] == "step"]
    checks = [record for record in records if record["event"] == "held out"]
    unit, name = time_unit(max(record["seconds"] for record in records))
    above, below = figure.subplots(2, 1, sharex=True)

    def times(of: list[Record]) -> list[float]:
        return [record["seconds"] / unit for record in of]

    depth = len(steps[-1]["cross_entropies"]) if steps else 0
    for step in range(depth):
        known = [record for record in steps if step < len(record["cross_entropies"])]
        losses = [record["cross_entropies"][step] for record in known]
        above.plot(times(known), losses, label=f"guess {step + 1}")
    above.set_title("Cross entropy with the target's distribution, nats")
    legend_beside(above)
    below.plot(times(checks), [record["accept_length"] for record in checks], marker="o")
    below.set_title("Accept length on held-out rollouts, tokens per forward")
    below.set_xlabel(f"time of training, {name}")
