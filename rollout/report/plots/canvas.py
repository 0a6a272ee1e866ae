"""The look of every plot, light and dark. The only file that imports matplotlib at run time."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.errors import InvalidInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

_DOTS_PER_INCH = 130


class NothingToDrawError(Exception):
    """A plot has no data. The message tells the page's reader why."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a plot. The series use Okabe and Ito's palette, safe for colour-blind readers."""

    background: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]
    colormap: str  # for ordered series
    dark: bool = False


LIGHT = Theme(
    background="#ffffff",
    ink="#1f2328",
    muted="#656d76",
    grid="#d8dee4",
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    colormap="viridis_r",
)
DARK = Theme(
    background="#161b22",
    ink="#e6edf3",
    muted="#9198a1",
    grid="#30363d",
    series=("#56b4e9", "#e8833a", "#2fbf95", "#e09cc4", "#f0b93a", "#9fd3f5"),
    colormap="viridis",
    dark=True,
)

Draw = Callable[["Figure", Theme], None]


def render(draw: Draw, theme: Theme, inches: tuple[float, float]) -> bytes:
    """The figure that ``draw`` fills, as PNG bytes.

    Raises InvalidInputError if matplotlib is missing, and NothingToDrawError as ``draw`` does.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInputError(
            "report", "matplotlib", "is not installed: pip install 'specrollout[report]'"
        ) from None
    with rc_context(_settings(theme)):
        figure = Figure(figsize=inches, dpi=_DOTS_PER_INCH, layout="constrained")
        draw(figure, theme)
        png = io.BytesIO()
        FigureCanvasAgg(figure).print_png(png)
    return png.getvalue()


def _settings(theme: Theme) -> dict[Any, Any]:
    from cycler import cycler

    return {
        "figure.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.muted,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=theme.series),
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture everywhere
        "font.size": 10,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
    }


def shades(theme: Theme, number: int) -> list[tuple[float, float, float, float]]:
    """``number`` colours of an ordered series."""
    from matplotlib import colormaps

    return [colormaps[theme.colormap](0.15 + 0.7 * (i + 0.5) / number) for i in range(number)]


def legend_beside(axes: Axes, *, from_top: bool = False) -> None:
    """Put the legend outside of the axes, each name once; ``from_top``: in stacking order."""
    handles, names = axes.get_legend_handles_labels()
    by_name = dict(zip(names, handles, strict=True))
    if by_name:
        axes.legend(
            by_name.values(), by_name.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.02),
            borderaxespad=0.4, reverse=from_top,
        )  # fmt: skip


def time_unit(seconds: float) -> tuple[float, str]:
    """A unit that suits a span of ``seconds``: its length in seconds, and its name."""
    if seconds < 600:
        return 1.0, "s"
    return (60.0, "min") if seconds < 4 * 3600 else (3600.0, "h")


def evenly(unit: float, span: float) -> Locator:
    """A locator of ticks at round numbers of units, for an axis of length ``span``."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    first, second = MaxNLocator(nbins=9, steps=[1, 2, 5, 10]).tick_values(0.0, span / unit)[:2]
    return MultipleLocator((second - first) * unit)
