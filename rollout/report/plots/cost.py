"""The cost of a forward by its query rows: measured, and as learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.report.learned import CostCurve, cost_curve
from rollout.report.plots.canvas import NothingToDrawError, Theme, legend_beside, shades
from rollout.report.run import Log, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_POINTS = 4000
_MAX_CONTEXTS = 6


def cost(figure: Figure, theme: Theme, log: Log) -> None:
    """Draw the cost of decoding forwards. May raise NothingToDrawError."""
    points = [_decode_points(run) for run in log.runs]
    rows, milliseconds = (np.concatenate(each) for each in zip(*points, strict=True))
    curve = next((found for run in reversed(log.runs) if (found := cost_curve(run.learned))), None)
    if not len(rows) and curve is None:
        raise NothingToDrawError(
            "No forward only decoded, and no curve was learned (spec=none learns none)."
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
    """Rows and milliseconds of forwards without prefill: rows are roots and draft nodes."""
    steps = run.steps
    decodes = steps["query_tokens"] == steps["sampling"] + np.nan_to_num(steps["drafted"])
    chosen = decodes & (steps["sampling"] > 0) & (steps["forward_ms"] > 0)
    return steps["query_tokens"][chosen], steps["forward_ms"][chosen]


def _draw_points(axes: Axes, theme: Theme, rows: np.ndarray, milliseconds: np.ndarray) -> float:
    """Draw the steps. Returns the upper end for the axis."""
    every = -(-len(rows) // _MAX_POINTS)
    axes.scatter(rows[::every], milliseconds[::every], s=9, color=theme.muted, alpha=0.45,
                 linewidth=0, label="steps")  # fmt: skip
    edges = _row_edges(rows)
    bins = np.digitize(rows, edges)
    for bin_index in np.unique(bins):
        here = bins == bin_index
        low, middle, high = np.quantile(milliseconds[here], (0.25, 0.5, 0.75))
        axes.errorbar(
            np.median(rows[here]), middle, [[middle - low], [high - middle]], color=theme.ink,
            marker="o", markersize=4, linewidth=1.0, capsize=2,
            label="median and quartiles" if bin_index == bins.min() else None,
        )  # fmt: skip
    # Steps that the machine interrupted take many times as long, and are cut off.
    return float(np.quantile(milliseconds, 0.97)) * 1.5


def _row_edges(rows: np.ndarray) -> np.ndarray:
    """Edges of bins: one bin per row count while there are few of them, else quantiles."""
    distinct = np.unique(rows)
    if len(distinct) <= 24:
        return (distinct[1:] + distinct[:-1]) / 2
    return np.unique(np.quantile(rows, np.linspace(0, 1, 25)[1:-1]))


def _draw_curve(axes: Axes, theme: Theme, curve: CostCurve, max_rows: float) -> float:
    """Draw the learned curve up to ``max_rows``. Returns the upper end for the axis."""
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
    """Indices of a few contexts, evenly chosen among those with observations, or among all."""
    known = np.flatnonzero(np.nansum(curve.observations_CR, axis=1) > 0)
    if not len(known):
        known = np.arange(len(curve.contexts_C))
    chosen = np.linspace(0, len(known) - 1, min(len(known), _MAX_CONTEXTS)).round().astype(int)
    return [int(index) for index in known[chosen]]
