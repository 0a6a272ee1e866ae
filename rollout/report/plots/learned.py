"""Plots of learned estimates against measurements: the cost of a forward, and acceptance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.report.learned import NUM_TENTHS, CostCurve, calibration, cost_curve
from rollout.report.plots.canvas import NothingToDrawError, Theme, legend_beside, shades
from rollout.report.run import Log, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 4000
_MAX_CONTEXTS = 6


def cost(figure: Figure, theme: Theme, log: Log) -> None:
    """The cost of a forward by its query rows: as measured, and the curve that was learned."""
    points = [_decode_points(run) for run in log.runs]
    rows, milliseconds = (np.concatenate(each) for each in zip(*points, strict=True))
    curve = next((found for run in reversed(log.runs) if (found := cost_curve(run.learned))), None)
    if not len(rows) and curve is None:
        raise NothingToDrawError(
            "No forward was of decoding alone, and no curve was learned (spec=none learns none)."
        )
    axes = figure.subplots()
    top = _draw_points(axes, theme, rows, milliseconds) if len(rows) else 0.0
    if curve is not None:
        max_rows = rows.max() if len(rows) else curve.rows_R[-1]
        curve_top = _draw_curve(axes, theme, curve, max_rows)
        top = max(top, min(curve_top, 2 * top) if top else curve_top)
    axes.set_xlabel("query rows of a forward (roots and draft nodes)")
    axes.set_ylabel("forward (ms)")
    axes.set_ylim(0, max(top, 1e-3))
    axes.set_xlim(left=0)
    legend_beside(axes)


def _decode_points(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Rows and milliseconds of forwards without prefill: one root per request, and its nodes."""
    steps = run.steps
    decodes = steps["query_tokens"] == steps["sampling"] + np.nan_to_num(steps["drafted"])
    chosen = decodes & (steps["sampling"] > 0) & (steps["forward_ms"] > 0)
    return steps["query_tokens"][chosen], steps["forward_ms"][chosen]


def _draw_points(axes: Axes, theme: Theme, rows: np.ndarray, milliseconds: np.ndarray) -> float:
    """Returns where the axis should end."""
    every = -(-len(rows) // _MAX_POINTS)
    axes.scatter(rows[::every], milliseconds[::every], s=9, color=theme.muted, alpha=0.45,
                 linewidth=0, label="steps")  # fmt: skip
    edges = _row_edges(rows)
    bins = np.digitize(rows, edges)
    for index in np.unique(bins):
        here = bins == index
        low, middle, high = np.quantile(milliseconds[here], (0.25, 0.5, 0.75))
        axes.errorbar(
            np.median(rows[here]), middle, [[middle - low], [high - middle]], color=theme.ink,
            marker="o", markersize=4, linewidth=1.0, capsize=2,
            label="median and quartiles" if index == bins.min() else None,
        )  # fmt: skip
    # Steps that the machine interrupted take many times as long: they stay out of sight.
    return float(np.quantile(milliseconds, 0.97)) * 1.5


def _row_edges(rows: np.ndarray) -> np.ndarray:
    """One row count each while there are few of them."""
    distinct = np.unique(rows)
    if len(distinct) <= 24:
        return (distinct[1:] + distinct[:-1]) / 2
    return np.unique(np.quantile(rows, np.linspace(0, 1, 25)[1:-1]))


def _draw_curve(axes: Axes, theme: Theme, curve: CostCurve, max_rows: float) -> float:
    """Draws the curve as far as steps went. Returns where the axis should end."""
    end = int(np.searchsorted(curve.rows_R, max_rows)) + 1
    contexts = _contexts(curve)
    for color, context in zip(shades(theme, len(contexts)), contexts, strict=True):
        rows, milliseconds = curve.rows_R[:end], curve.milliseconds_CR[context][:end]
        label = f"curve, context to {curve.contexts_C[context]:,.0f}"
        axes.plot(rows, milliseconds, color=color, label=label)
        seen = curve.observations_CR[context][:end] > 0
        axes.plot(rows[seen], milliseconds[seen], color=color, linestyle="", marker="D",
                  markersize=4)  # fmt: skip
    drawn = curve.milliseconds_CR[contexts][:, :end]
    return float(np.nanmax(drawn, initial=0.0)) * 1.1


def _contexts(curve: CostCurve) -> list[int]:
    """The contexts with observations, or all where none are given; a few, evenly chosen."""
    known = np.flatnonzero(np.nansum(curve.observations_CR, axis=1) > 0)
    if not len(known):
        known = np.arange(len(curve.contexts_C))
    chosen = np.linspace(0, len(known) - 1, min(len(known), _MAX_CONTEXTS)).round().astype(int)
    return [int(index) for index in known[chosen]]


def calibration_by_tenth(figure: Figure, theme: Theme, log: Log) -> None:
    """Estimated against real acceptance of draft nodes."""
    found = next((each for run in reversed(log.runs) if (each := calibration(run.learned))), None)
    if found is None:
        raise NothingToDrawError(
            "No draft node was judged by a learned budget, or the log ends before that was written "
            "(spec=none drafts nothing)."
        )
    rates, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    seen = found.count_K > 0
    count_J, accepted_J = found.count_K[seen], found.accepted_K[seen]
    estimate_J, rate_J = found.expected_K[seen] / count_J, accepted_J / count_J
    low_J, high_J = _interval(rate_J, count_J)
    rates.plot([0, 1], [0, 1], color=theme.muted, linewidth=1.0, linestyle="--", label="perfect")
    rates.errorbar(
        estimate_J, rate_J, [rate_J - low_J, high_J - rate_J], color=theme.series[0], marker="o",
        markersize=5, linewidth=1.4, elinewidth=1.0, capsize=3, label="accepted,\n95 % interval",
    )  # fmt: skip
    rates.set(ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    middles_K = (np.arange(NUM_TENTHS) + 0.5) / NUM_TENTHS
    counts.bar(middles_K, found.count_K, width=0.8 / NUM_TENTHS, color=theme.series[0])
    counts.set(xlabel="estimated probability of being accepted", ylabel="nodes verified")
    counts.set_xticks(np.arange(NUM_TENTHS + 1) / NUM_TENTHS)
    if count_J.max() > 50 * count_J.min():
        counts.set_yscale("log")
    legend_beside(rates)


def _interval(rate_J: np.ndarray, count_J: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval of a binomial share (E. B. Wilson, JASA 1927), at 95 %."""
    z = 1.96
    middle_J = (rate_J + z**2 / (2 * count_J)) / (1 + z**2 / count_J)
    spread_J = np.sqrt(np.maximum(rate_J * (1 - rate_J), 0) / count_J + (z / (2 * count_J)) ** 2)
    half_J = z * spread_J / (1 + z**2 / count_J)
    return np.minimum(middle_J - half_J, rate_J), np.maximum(middle_J + half_J, rate_J)
