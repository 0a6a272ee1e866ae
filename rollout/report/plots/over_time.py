"""Plots over generating time: averages of steps with the runs one after another, and the tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.report.figures import phase_milliseconds
from rollout.report.plots.canvas import NothingToDrawError, Theme, evenly, legend_beside, time_unit
from rollout.report.run import Log, Run, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_BINS = 300


class Bins:
    """Consecutive steps of one run in at most ``max_bins`` bins of nearly equal size."""

    def __init__(self, run: Run, max_bins: int = MAX_BINS) -> None:
        assert run.num_steps, "a run without steps has no bins"
        self._run = run
        num_bins = min(max(max_bins, 1), run.num_steps)
        self._starts = np.arange(num_bins) * run.num_steps // num_bins
        self.ends = run.offset + run.step_seconds[[*(self._starts[1:] - 1), run.num_steps - 1]]

    def total(self, values: np.ndarray) -> np.ndarray:
        """[bins] sums, ignoring NaN."""
        return np.add.reduceat(np.nan_to_num(values), self._starts)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """[bins] means, ignoring NaN; NaN for a bin without values."""
        known = self.total(np.isfinite(values).astype(float))
        return np.where(known > 0, self.total(values) / np.maximum(known, 1), np.nan)

    def ratio(self, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """[bins] sum of ``part`` over sum of ``whole``; NaN where the latter is 0."""
        wholes = self.total(whole)
        return np.where(wholes > 0, self.total(part) / np.where(wholes > 0, wholes, 1.0), np.nan)

    def median(self, values: np.ndarray) -> np.ndarray:
        """[bins] medians, ignoring NaN; NaN for a bin without values."""
        parts = np.split(values, self._starts[1:])
        known = [part[np.isfinite(part)] for part in parts]
        return np.array([np.median(part) if len(part) else np.nan for part in known])


_FEW = 40  # points of a smooth line; lines of at most so many points have markers


def accept_length(figure: Figure, theme: Theme, log: Log) -> None:
    """Draw accept length and batch width. May raise NothingToDrawError."""
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
    """Draw the phases' shares of a step. May raise NothingToDrawError."""
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
        # The first bin starts where the run begins.
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
    """Draw predicted and real times and gains. May raise NothingToDrawError."""
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
    """The runs with their bins, shared out by the runs' steps."""
    num_steps = sum(run.num_steps for run in runs)
    return [(run, Bins(run, max(2, MAX_BINS * run.num_steps // num_steps))) for run in runs]


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, *, label: str, **style: object) -> None:
    marker = "o" if len(x) <= _FEW else ""
    axes.plot(x, y, label=label, marker=marker, markersize=3.5, **style)  # type: ignore[arg-type]


def _ignore_outliers(axes: Axes) -> None:
    """End the axis above 99 % of the points, so that a few outliers do not flatten the rest."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    drawn = drawn[np.isfinite(drawn)]
    top = float(np.quantile(drawn, 0.99)) * 1.3
    axes.set_ylim(0, max(top, 1e-3) if top < drawn.max() else float(drawn.max()) * 1.05 or 1.0)


def _finish(all_axes: tuple[Axes, ...], theme: Theme, runs: list[Run]) -> None:
    """Label the time axis in a suitable unit, and draw a dashed line where a run begins."""
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


_MAX_RUNS = 6
_MAX_ROLLOUTS = 24
_MIN_ROWS = 10  # room for so many bars at least, so that a few are not too thick


def tail(figure: Figure, theme: Theme, log: Log) -> None:
    """Draw the end of each run and its last rollouts. May raise NothingToDrawError."""
    runs = [run for run in log.runs if run.num_steps][-_MAX_RUNS:]
    if not runs:
        raise NothingToDrawError("The log holds no steps yet.")
    shown_seconds = max(_tail_seconds(run) for run in runs)
    last = _last_rollouts(runs[-1], shown_seconds)
    if len(last):
        widths, spans = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
        _draw_spans(spans, theme, runs[-1], last)
    else:
        widths = spans = figure.subplots()
    _draw_widths(widths, theme, runs, shown_seconds)
    unit, name = time_unit(shown_seconds)
    whose = "the run's end" if len(runs) == 1 else "each run's end"
    spans.set(xlabel=f"time before {whose} ({name})", xlim=(-shown_seconds, 0))
    spans.xaxis.set_major_locator(evenly(unit, shown_seconds))
    spans.xaxis.set_major_formatter(lambda seconds, _: f"{abs(round(seconds / unit, 6)):g}")


def _draw_widths(axes: Axes, theme: Theme, runs: list[Run], shown_seconds: float) -> None:
    top = 1.0
    for run, color in zip(runs, theme.series, strict=False):
        shown = run.step_seconds >= run.seconds - shown_seconds
        bins = Bins(run, MAX_BINS * run.num_steps // max(int(shown.sum()), 1))
        before_end = bins.ends - run.offset - run.seconds
        lines = [("running", f"run {run.number}" if len(runs) > 1 else "running", color, "-")]
        if len(runs) == 1 and np.nan_to_num(run.steps["waiting"][shown]).any():
            lines.append(("waiting", "waiting", theme.series[1], "--"))
        for name, label, line_color, style in lines:
            axes.plot(before_end, bins.mean(run.steps[name]), color=line_color, label=label,
                      linestyle=style, drawstyle="steps-pre")  # fmt: skip
            top = max(top, float(np.nanmax(run.steps[name][shown], initial=0.0)))
    axes.set_ylabel("requests")
    axes.set_ylim(0, top * 1.05)
    axes.locator_params(axis="y", integer=True)
    legend_beside(axes)


def _tail_seconds(run: Run) -> float:
    """Twice the time from when half as many requests ran as at the peak, to the end."""
    running = run.steps["running"]
    peak = np.nanmax(running, initial=0.0)
    wide = np.flatnonzero(running >= peak / 2)
    since = run.seconds - run.step_seconds[wide[-1]] if len(wide) else run.seconds
    return float(max(min(run.seconds, 2 * since), run.seconds / 20, 1e-3))


def _last_rollouts(run: Run, shown_seconds: float) -> np.ndarray:
    """Indices of the rollouts that ended last, the last one first."""
    shown = run.ended_seconds > run.seconds - shown_seconds
    known = np.flatnonzero(shown & np.isfinite(run.began_seconds))
    return known[np.argsort(-run.ended_seconds[known], kind="stable")][:_MAX_ROLLOUTS]


def _draw_spans(axes: Axes, theme: Theme, run: Run, rollouts: np.ndarray) -> None:
    began = run.began_seconds[rollouts] - run.seconds
    ended = run.ended_seconds[rollouts] - run.seconds
    rows = np.arange(len(rollouts))
    axes.barh(rows, ended - began, left=began, height=0.62, color=theme.series[0], linewidth=0)
    axes.set_yticks(rows, [_name(run, index) for index in rollouts], fontsize=8)
    axes.set_ylim(max(len(rollouts), _MIN_ROWS) - 0.4, -0.6)  # the last to end on top
    axes.grid(visible=False, axis="y")
    axes.set_title(
        f"last to end{f' in run {run.number}' if run.number > 1 else ''}: prompt.sample", fontsize=9
    )
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(rows, [_outcome(run, index) for index in rollouts], fontsize=8)
    beside.tick_params(length=0)
    beside.spines["right"].set_visible(False)


def _name(run: Run, index: int) -> str:
    prompt, sample = (run.rollouts[name][index] for name in ("prompt_index", "sample_index"))
    return ".".join("?" if np.isnan(each) else f"{each:.0f}" for each in (prompt, sample))


def _outcome(run: Run, index: int) -> str:
    of = {name: float(values[index]) for name, values in run.rollouts.items()}
    accepted = ratio(of["verify_steps"] + of["accepted"], of["verify_steps"])
    tokens = "?" if np.isnan(of["generated_tokens"]) else f"{of['generated_tokens']:,.0f}"
    return f"{tokens} tokens" + (
        f", {accepted:.2f} a forward" if accepted is not None and np.isfinite(accepted) else ""
    )
