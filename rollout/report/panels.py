"""The parts of a chart, as data that charts.js draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Panel = dict[str, Any]
"""An argument of drawChart in charts.js, and its caption."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the page: its texts and panels, or the reason why it has none."""

    name: str  # of its anchor
    title: str
    caption: str
    panels: list[Panel] = field(default_factory=list)
    missing: str = ""


def make_line(
    label: str,
    x: np.ndarray,
    y: np.ndarray,
    series: int,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
    *,
    dots: bool = False,
) -> dict[str, Any]:
    """A line of a panel; ``low`` and ``high`` make a band around it."""
    columns = [x, y] if low is None or high is None else [x, y, low, high]
    points = [[short(value) for value in point] for point in zip(*columns, strict=True)]
    return {"label": label, "points": points, "series": series, "dots": dots or len(points) < 3}


def make_panel(
    caption: str,
    *,
    lines: list[dict[str, Any]] | None = None,
    marks: list[dict[str, Any]] | None = None,
    y_from: float | None = 0.0,
    **options: Any,
) -> Panel:
    """A panel whose axes cover its points; ``y_from``: None lets them decide, with 0 among them."""
    lines, marks = lines or [], marks or []
    points = [point for each in (*lines, *marks) for point in each["points"]]
    xs = [point[0] for point in points if point[0] is not None]
    ys = [value for point in points for value in (point[1], *point[2:])
          if isinstance(value, (int, float))]  # fmt: skip
    top = max(ys, default=1.0) * 1.06
    bottom = y_from if y_from is not None else min(0.0, *ys, 0.0) * 1.06
    return {
        "caption": caption, "lines": lines, "marks": marks,
        "x": {"from": 0, "to": max(xs, default=1.0) or 1.0},
        "y": {"from": bottom, "to": max(top, bottom + 1e-3)}, **options,
    }  # fmt: skip


def panels_or(panels: Iterable[Panel], missing: str) -> tuple[list[Panel], str]:
    """The panels with anything to draw, or why there are none."""
    drawn = [
        panel
        for panel in panels
        if any(
            len(point) > 1 and point[1] is not None
            for kind in ("lines", "marks", "spans")
            for each in panel.get(kind, ())
            for point in each["points"]
        )
    ]
    return drawn, "" if drawn else missing


def short(value: float) -> float | None:
    """Five significant digits; None for NaN, which JSON has not."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def time_unit(seconds: float) -> tuple[float, str]:
    """A unit that suits a span of ``seconds``: its length in seconds, and its name."""
    if seconds < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")
