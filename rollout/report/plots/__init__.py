"""The plots of a report, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.report.plots import over_time
from rollout.report.plots.canvas import DARK, LIGHT, NothingToDrawError, Theme, render
from rollout.report.plots.learned import calibration_by_tenth, cost
from rollout.report.plots.rollouts import lengths, tail
from rollout.report.run import Log

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of the page, and how it is drawn."""

    name: str  # of its file, and of its anchor in the page
    title: str
    caption: str
    draw: Callable[[Figure, Theme, Log], None]
    inches: tuple[float, float] = (9.6, 4.4)


PLOTS = (
    Plot(
        "accept_length",
        "Accept length and batch width",
        "Tokens emitted per target forward of a request, its own included; below, how many "
        "requests ran. Each point is the mean over the steps since the one before.",
        over_time.accept_length,
        (9.6, 4.8),
    ),
    Plot(
        "tail",
        "The tail",
        "How a run thins out towards its end, and the rollouts that ended last, from their first "
        "target forward on, with their length and accept length.",
        tail,
        (9.6, 6.4),
    ),
    Plot(
        "cost",
        "Cost of a forward",
        "Steps of decoding alone: the query rows of the forward and the time it took, without "
        "drafting and sampling. Curves: what the engine learned of it, diamonds where it measured.",
        cost,
    ),
    Plot(
        "calibration",
        "Calibration",
        "Verified draft nodes by tenth of the probability they were estimated to be accepted "
        "with, and the share of them that was.",
        calibration_by_tenth,
        (9.6, 4.8),
    ),
    Plot(
        "time",
        "Where the time went",
        "Shares of the engine's time per step; the rest is what no phase counts. Reading prompts "
        "and writing rollouts lie between the steps.",
        over_time.phases,
        (9.6, 4.0),
    ),
    Plot(
        "lengths",
        "Lengths by group",
        "Generated tokens of the samples of each prompt, the groups longest on average first: "
        "boxes from quartile to quartile, whiskers to the extremes.",
        lengths,
    ),
    Plot(
        "forecast",
        "Predicted and real",
        "Time of drafting, forward and sampling as predicted and as it came, the median of each "
        "stretch; below, what speculation saved against plain decoding, summed up, by the "
        "estimates and by what was accepted.",
        over_time.forecasts,
        (9.6, 4.8),
    ),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot, or why it is not there."""

    plot: Plot
    light: bytes = b""  # PNG
    dark: bytes = b""  # PNG
    missing: str | None = None


def draw_all(log: Log) -> list[Picture]:
    """Raises InvalidInputError where matplotlib is missing."""
    return [_draw(plot, log) for plot in PLOTS]


def _draw(plot: Plot, log: Log) -> Picture:
    try:
        light, dark = (
            render(lambda figure, theme: plot.draw(figure, theme, log), theme, plot.inches)
            for theme in (LIGHT, DARK)
        )
    except NothingToDrawError as reason:
        return Picture(plot, missing=str(reason))
    return Picture(plot, light, dark)
