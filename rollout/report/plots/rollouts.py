"""Plots of rollouts: the tail, who is last, and lengths by prompt group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.report.plots.canvas import NothingToDrawError, Theme, evenly, legend_beside, time_unit
from rollout.report.run import MAX_BINS, Bins, Log, Run, ratio
from rollout.report.tables import members_of_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_GROUPS = 40
_MAX_RUNS = 6
_MAX_ROLLOUTS = 24
_MIN_ROWS = 10  # so that a few bars are not fat


def tail(figure: Figure, theme: Theme, log: Log) -> None:
    """How a run thins out towards its end, and who is last."""
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
    most = 1.0
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
            most = max(most, float(np.nanmax(run.steps[name][shown], initial=0.0)))
    axes.set_ylabel("requests")
    axes.set_ylim(0, most * 1.05)
    axes.locator_params(axis="y", integer=True)
    legend_beside(axes)


def _tail_seconds(run: Run) -> float:
    """Since half as many requests ran as at most, and as long again before that."""
    running = run.steps["running"]
    at_most = np.nanmax(running, initial=0.0)
    wide = np.flatnonzero(running >= at_most / 2)
    since = run.seconds - run.step_seconds[wide[-1]] if len(wide) else run.seconds
    return float(max(min(run.seconds, 2 * since), run.seconds / 20, 1e-3))


def _last_rollouts(run: Run, shown_seconds: float) -> np.ndarray:
    """Indices of those that ended last, the very last first."""
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


def lengths(figure: Figure, theme: Theme, log: Log) -> None:
    """Generated tokens of the samples of each prompt, the longest groups first."""
    groups = _longest_groups(log)
    if not groups:
        raise NothingToDrawError("No rollout had finished when the log ended.")
    axes = figure.subplots()
    shown = groups[:_MAX_GROUPS]
    axes.boxplot(
        [lengths_R for _, lengths_R, _ in shown], positions=range(len(shown)), widths=0.55,
        showfliers=False, whis=(0, 100), patch_artist=True, manage_ticks=False,
        boxprops={"facecolor": theme.grid, "edgecolor": theme.muted},
        medianprops={"color": theme.ink, "linewidth": 1.6},
        whiskerprops={"color": theme.muted}, capprops={"color": theme.muted},
    )  # fmt: skip
    points = [
        (position + _spread(index), length, is_cut)
        for position, (_, lengths_R, cut_R) in enumerate(shown)
        for index, (length, is_cut) in enumerate(zip(lengths_R, cut_R, strict=True))
    ]
    for cut, name, marker, color in (
        (False, "ended before", "o", theme.series[0]),
        (True, "cut at its limit", "^", theme.series[1]),
    ):
        x, y = ([point[axis] for point in points if point[2] == cut] for axis in (0, 1))
        if x:
            axes.scatter(
                x,
                y,
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
    """(name, lengths, which were cut) by mean length, the longest first."""
    several = len(log.runs) > 1
    groups = []
    for run in log.runs:
        for members in members_of_groups(run).values():
            lengths_R = run.rollouts["generated_tokens"][members]
            cut_R = np.array([run.finish_reasons[index] == "length" for index in members])
            known = np.isfinite(lengths_R)
            if known.any():
                name = _group_name(run, members, several)
                groups.append((name, lengths_R[known], cut_R[known]))
    return sorted(groups, key=lambda group: -float(group[1].mean()))


def _group_name(run: Run, members: np.ndarray, several: bool) -> str:
    prompt = run.rollouts["prompt_index"][members[0]]
    name = "?" if np.isnan(prompt) else f"{prompt:.0f}"
    return f"{run.number}:{name}" if several else name


def _spread(index: int) -> float:
    """Side by side rather than one over the other; the same in every picture."""
    return ((index * 0.618034) % 1.0 - 0.5) * 0.42
