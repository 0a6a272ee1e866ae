"""Rollout lengths by prompt group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.report.plots.canvas import NothingToDrawError, Theme, legend_beside
from rollout.report.run import Log, Run
from rollout.report.tables import members_of_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_GROUPS = 40


def lengths(figure: Figure, theme: Theme, log: Log) -> None:
    """Draw the generated tokens of each group's rollouts. May raise NothingToDrawError."""
    groups = _longest_groups(log)
    if not groups:
        raise NothingToDrawError("No rollout had finished when the log ended.")
    axes = figure.subplots()
    shown = groups[:MAX_GROUPS]
    axes.boxplot(
        [lengths_R for _, lengths_R, _ in shown], positions=range(len(shown)), widths=0.55,
        showfliers=False, whis=(0, 100), patch_artist=True, manage_ticks=False,
        boxprops={"facecolor": theme.grid, "edgecolor": theme.muted},
        medianprops={"color": theme.ink, "linewidth": 1.6},
        whiskerprops={"color": theme.muted}, capprops={"color": theme.muted},
    )  # fmt: skip
    points = [
        (x + _spread(index), length, is_cut)
        for x, (_, lengths_R, cut_R) in enumerate(shown)
        for index, (length, is_cut) in enumerate(zip(lengths_R, cut_R, strict=True))
    ]
    for cut, name, marker, color in (
        (False, "ended before", "o", theme.series[0]),
        (True, "cut at its limit", "^", theme.series[1]),
    ):
        xs, ys = ([point[axis] for point in points if point[2] == cut] for axis in (0, 1))
        if xs:
            axes.scatter(
                xs,
                ys,
                s=14,
                marker=marker,
                color=color,
                alpha=0.75,
                linewidth=0,
                label=name,
                zorder=3,
            )
    several = len(log.runs) > 1
    axes.set_xticks(range(len(shown)), [name for name, _, _ in shown],
                    rotation=90 if len(shown) > 20 or several else 0, fontsize=8)  # fmt: skip
    left_out = f" (longest {len(shown)} of {len(groups)})" if len(groups) > len(shown) else ""
    axes.set(xlabel=("run:prompt" if several else "prompt") + left_out,
             ylabel="generated tokens", xlim=(-0.7, max(len(shown), 8) - 0.3))  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    legend_beside(axes)


def _longest_groups(log: Log) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, lengths, whether each was cut) of every group, by descending mean length."""
    several = len(log.runs) > 1
    groups = [
        (_name(run, members, several), run.rollouts["generated_tokens"][members][known], cut[known])
        for run in log.runs
        for members in members_of_groups(run).values()
        if (known := np.isfinite(run.rollouts["generated_tokens"][members])).any()
        and len(cut := np.array([run.finish_reasons[index] == "length" for index in members]))
    ]
    return sorted(groups, key=lambda group: -float(group[1].mean()))


def _name(run: Run, members: np.ndarray, several: bool) -> str:
    prompt = run.rollouts["prompt_index"][members[0]]
    name = "?" if np.isnan(prompt) else f"{prompt:.0f}"
    return f"{run.number}:{name}" if several else name


def _spread(index: int) -> float:
    """A fixed horizontal offset, so that points of a group do not cover each other."""
    return ((index * 0.618034) % 1.0 - 0.5) * 0.42
