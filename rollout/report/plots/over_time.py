"""Plots whose horizontal axis is generating time, the runs one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.report.figures import phase_milliseconds
from rollout.report.plots.canvas import NothingToDrawError, Theme, evenly, legend_beside, time_unit
from rollout.report.run import MAX_BINS, Bins, Log, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 40  # points that are marked one by one; and enough for a line that is smooth


def accept_length(figure: Figure, theme: Theme, log: Log) -> None:
    """Accept length above, batch width below."""
    runs = _with_steps(log)
    lengths, widths = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for run, bins in _binned(runs):
        steps = run.steps
        smooth = Bins(run, _FEW)
        is_smoother = len(smooth.ends) < len(bins.ends)
        if is_smoother:
            fine = bins.ratio(steps["generated_tokens"], steps["sampling"])
            lengths.plot(bins.ends, fine, color=theme.series[0], alpha=0.3, linewidth=0.9,
                         label="mean of few steps")  # fmt: skip
        _line(lengths, smooth.ends, smooth.ratio(steps["generated_tokens"], steps["sampling"]),
              color=theme.series[0],
              label="mean of many" if is_smoother else "each step")  # fmt: skip
        _line(widths, bins.ends, bins.mean(steps["running"]), color=theme.series[0],
              label="running")  # fmt: skip
        _line(widths, bins.ends, bins.mean(steps["sampling"]), color=theme.series[1],
              linestyle="--", label="sampled from")  # fmt: skip
    lengths.axhline(1.0, color=theme.muted, linewidth=1.0)
    lengths.set(ylabel="accept length\n(tokens per forward)")
    lengths.set_ylim(0.95, max(lengths.get_ylim()[1], 1.25))
    widths.set(ylabel="requests in a step")
    widths.set_ylim(bottom=0)
    widths.locator_params(axis="y", integer=True)
    _finish((lengths, widths), theme, runs)


def phases(figure: Figure, theme: Theme, log: Log) -> None:
    """Shares of the phases in the time of the steps."""
    runs = _with_steps(log)
    axes = figure.subplots()
    drawn = False
    for run, bins in _binned(runs):
        totals = {name: bins.total(ms) for name, ms in phase_milliseconds(run.steps).items()}
        whole = np.sum(list(totals.values()), axis=0)
        if not whole.any():
            continue
        drawn = True
        shares = [ms / np.where(whole > 0, whole, 1.0) * 100 for ms in totals.values()]
        # The first bin reaches back to where the run begins.
        seconds = np.concatenate([[run.offset], bins.ends])
        stacked = [np.concatenate([share[:1], share]) for share in shares]
        colors = (*theme.series[:4], theme.muted)
        axes.stackplot(
            seconds, stacked, labels=list(totals), colors=colors, step="pre", linewidth=0
        )
    if not drawn:
        raise NothingToDrawError("No step says how long it took.")
    axes.set(ylabel="share of a step's time (%)", ylim=(0, 100))
    axes.grid(visible=False)
    _finish((axes,), theme, runs)
    legend_beside(axes, from_top=True)


def forecasts(figure: Figure, theme: Theme, log: Log) -> None:
    """Predicted against real times, and the time saved so far."""
    runs = [run for run in log.runs if run.has_forecast.any()]
    if not runs:
        raise NothingToDrawError(
            "No step was forecast: only spec.budget=learned knows what steps cost."
        )
    times, gains = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for run, bins in _binned(runs):
        has_forecast = run.has_forecast
        real = np.where(has_forecast, run.step_ms, np.nan)
        predicted = np.where(has_forecast, run.steps["predicted_ms"], np.nan)
        coarse = Bins(run, _FEW)
        _line(times, coarse.ends, coarse.median(real), color=theme.series[0], label="real")
        _line(times, coarse.ends, coarse.median(predicted), color=theme.series[1], linestyle="--",
              label="predicted")  # fmt: skip
        for name, style, label, color in (
            ("gain_ms", "-", "real", theme.series[0]),
            ("predicted_gain_ms", "--", "predicted", theme.series[1]),
        ):
            summed = np.cumsum(bins.total(run.steps[name])) * run.steps_per_line / 1e3
            _line(gains, bins.ends, summed, linestyle=style, label=label, color=color)
    gains.axhline(0.0, color=theme.muted, linewidth=1.0)
    times.set(ylabel="draft, forward and\nsampling (ms, median step)")
    _ignore_outliers(times)
    gains.set(ylabel="time saved so far (s)")
    _finish((times, gains), theme, runs)


def _with_steps(log: Log) -> list[Run]:
    runs = [run for run in log.runs if run.num_steps]
    if not runs:
        raise NothingToDrawError("The log holds no steps yet.")
    return runs


def _binned(runs: list[Run]) -> list[tuple[Run, Bins]]:
    """Each gets as many points as its share of the steps."""
    num_steps = sum(run.num_steps for run in runs)
    return [(run, Bins(run, max(2, MAX_BINS * run.num_steps // num_steps))) for run in runs]


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, *, label: str, **style: object) -> None:
    marker = "o" if len(x) <= _FEW else ""
    axes.plot(x, y, label=label, marker=marker, markersize=3.5, **style)  # type: ignore[arg-type]


def _ignore_outliers(axes: Axes) -> None:
    """A hiccup of the machine must not flatten all the rest; the axis ends beyond most of it."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    drawn = drawn[np.isfinite(drawn)]
    most = float(np.quantile(drawn, 0.99)) * 1.3
    axes.set_ylim(0, max(most, 1e-3) if most < drawn.max() else float(drawn.max()) * 1.05 or 1.0)


def _finish(all_axes: tuple[Axes, ...], theme: Theme, runs: list[Run]) -> None:
    """The horizontal axis, in the unit that suits it, and a dashed line where a run begins."""
    first, last = runs[0].offset, max(runs[-1].offset + runs[-1].seconds, runs[0].offset + 1e-3)
    unit, name = time_unit(last)
    for axes in all_axes:
        for run in runs[1:]:
            axes.axvline(run.offset, color=theme.ink, linewidth=1.0, linestyle=(0, (4, 3)))
        legend_beside(axes)
        axes.set_xlim(first, last)
        axes.xaxis.set_major_locator(evenly(unit, last - first))
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / unit:g}")
    all_axes[-1].set_xlabel(f"generating time ({name})")
