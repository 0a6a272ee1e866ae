"""Pictures of replays."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from calibration import deciles, tenths
from replaying import Replay


def add_plot_option(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--plot", type=_plot_path, help="write a picture to this file")


def _plot_path(value: str) -> Path:
    """Found out before the run, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{value!r} needs matplotlib; install it first")
    return Path(value)


def plot_replays(results: list[Replay], path: Path) -> None:
    """A row per trace: accept length by epoch, and acceptance by estimate, for each drafter."""
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(result.trace.name for result in results))
    figure = Figure(figsize=(13, 4.5 * max(len(traces), 1)), layout="constrained")
    axes = figure.subplots(max(len(traces), 1), 2, squeeze=False)
    for (by_epoch, by_estimate), trace in zip(axes, traces, strict=False):
        by_epoch.set(title=trace, xlabel="epoch", ylabel="accept length (tokens)")
        by_estimate.set(title=trace, xlabel="estimated probability", ylabel="acceptance rate")
        by_estimate.axline((0, 0), slope=1, color="grey", linewidth=0.8)
        by_estimate.fill_between([0, 1], [-0.05, 0.95], [0.05, 1.05], color="grey", alpha=0.15)
        by_estimate.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        for result in results:
            if result.trace.name != trace:
                continue
            lengths = result.accept_length_by(result.trace.epoch_of_R)
            (line,) = by_epoch.plot(
                list(lengths), list(lengths.values()), marker="o", label=result.drafter
            )
            if len(result.estimates_J):
                for bins, marker, name in (
                    (deciles(result.estimates_J, result.accepted_J), "o", "deciles"),
                    (tenths(result.estimates_J, result.accepted_J), "x", "tenths"),
                ):
                    by_estimate.plot(
                        bins.estimate_K,
                        bins.rate_K,
                        marker=marker,
                        linestyle="",
                        color=line.get_color(),
                        label=f"{result.drafter}, {name}",
                    )
        by_epoch.set_ylim(bottom=1)
        by_epoch.locator_params(axis="x", integer=True)
        by_epoch.legend()
        if by_estimate.get_legend_handles_labels()[0]:
            by_estimate.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
