"""The charts of a report as data that charts.js draws, in the order of the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rollout.engine.speedup import HALF_INTERVAL
from rollout.report.key_figures import count
from rollout.report.learned import calibration, cost_curve
from rollout.report.panels import Chart, Panel, make_line, make_panel, panels_or, short, time_unit
from rollout.report.rollout_texts import RolloutTexts
from rollout.report.run import Bins, Log, Run
from rollout.report.verdict import saving_of

T = TypeVar("T")

_MAX_POINTS = 1500
_MAX_GROUPS = 40
_MAX_SPANS = 24
_GREY = 6  # the series of what is only a guide


def charts(log: Log, texts: RolloutTexts) -> list[Chart]:
    """All charts of a log."""
    return [
        _over_time(log),
        _saved(log),
        _lengths(log, texts),
        _cost(log),
        _calibration(log),
        _last_rollouts(log, texts),
    ]


def _over_time(log: Log) -> Chart:
    unit, unit_name = time_unit(max(run.seconds for run in log.runs))

    def panel(caption: str, values: Callable[[Run, Bins], np.ndarray]) -> Panel:
        lines = []
        for series, run in enumerate(log.runs):
            if run.num_steps:
                bins = Bins(run)
                lines.append(make_line(run.name, bins.ends / unit, values(run, bins), series))
        return make_panel(caption, lines=lines, height=170, xLabel=unit_name)

    def rate(run: Run, bins: Bins) -> np.ndarray:
        generated = bins.total(run.steps["generated_tokens"]) * run.steps_per_line
        took = np.diff(bins.ends, prepend=0.0)
        return np.where(took > 0, generated / np.where(took > 0, took, 1.0), np.nan)

    panels = [
        panel("tokens per second", rate),
        panel(
            "accept length: tokens per target forward of a request",
            lambda run, bins: bins.ratio(run.steps["generated_tokens"], run.steps["sampling"]),
        ),
        panel("requests running", lambda run, bins: bins.mean(run.steps["running"])),
    ]
    return Chart(
        "over_time",
        "Over time",
        "Means over consecutive steps since generation began. Drafts help most in the tail, where "
        "few requests still run.",
        *panels_or(panels, "The log holds no steps yet."),
    )


def _saved(log: Log) -> Chart:
    unit, unit_name = time_unit(max(run.seconds for run in log.runs))
    lines = []
    for series, run in enumerate(log.runs):
        if not run.num_steps or saving_of(run) is None or not np.nansum(run.steps["drafted"]):
            continue
        ends = Bins(run).last
        saved, error = (
            run.steps[name][ends] / run.num_replicas
            for name in ("saved_seconds", "saved_error_seconds")
        )
        saved = np.where(np.isfinite(error), saved, np.nan)
        seconds = run.step_seconds[ends]
        lines.append(
            make_line(run.name, seconds / unit, saved, series, saved - error, saved + error)
        )
    panel = make_panel("seconds saved", lines=lines, height=170, xLabel=unit_name, y_from=None)
    return Chart(
        "saved",
        "Time saved by drafts",
        "Cumulative, against plain decoding, with the 95 % interval. A band that covers 0 is "
        "inconclusive.",
        *panels_or(
            [panel], "Not measured: nothing was drafted, or spec.budget is not learned.",
        ),
    )  # fmt: skip


def _last_rollouts(log: Log, texts: RolloutTexts) -> Chart:
    unit, unit_name = time_unit(max(run.seconds for run in log.runs))
    panels = []
    for series, run in enumerate(log.runs):
        known = np.flatnonzero(np.isfinite(run.began_seconds + run.ended_seconds))
        order = known[np.argsort(-run.ended_seconds[known], kind="stable")]
        chosen = order[: max(_MAX_SPANS // len(log.runs), 6)]
        spans = [
            [
                short(run.began_seconds[index] / unit),
                short(run.ended_seconds[index] / unit),
                texts.tip(run, int(index)),
            ]
            for index in chosen
        ]
        if spans:
            panels.append({
                "caption": run.name or "prompt.sample, the last to finish on top",
                "spans": [{"points": spans, "series": series}],
                "x": {"from": 0, "to": short(max(run.seconds / unit, 1e-3))},
                "y": {"names": [texts.sample_name(run, int(index)) for index in chosen]},
                "xLabel": unit_name,
            })  # fmt: skip
    return Chart(
        "last",
        "The last rollouts",
        "From first target forward to finish, named prompt.sample. Hover for prompt, length and "
        "accept length.",
        *panels_or(panels, "No rollout had finished when the log ended."),
    )


def _lengths(log: Log, texts: RolloutTexts) -> Chart:
    """The chart of lengths, where prompts that several runs share have one column."""
    lengths: dict[str, list[float]] = {}
    for run in log.runs:
        for group, length in zip(run.groups, run.rollouts["generated_tokens"], strict=True):
            if np.isfinite(length):
                lengths.setdefault(group, []).append(float(length))
    longest = sorted(lengths, key=lambda group: -float(np.mean(lengths[group])))[:_MAX_GROUPS]
    columns = {group: column for column, group in enumerate(longest)}
    names = [""] * len(longest)
    marks = []
    for series, run in enumerate(log.runs):
        shown = [index for index, group in enumerate(run.groups) if group in columns]
        for index in shown:
            names[columns[run.groups[index]]] = count(run.rollouts["prompt_index"][index])
        beside = (series - (len(log.runs) - 1) / 2) * min(0.25, 0.8 / len(log.runs))
        points = [
            [
                columns[run.groups[index]] + beside,
                short(run.rollouts["generated_tokens"][index]),
                texts.tip(run, index),
            ]
            for index in _thinned(shown)
        ]
        marks.append({"label": run.name, "points": points, "series": series})
    panel = make_panel("generated tokens", marks=marks, height=220, xLabel="prompt")
    panel["x"] = {"names": names}
    left_out = (
        f" The longest {len(longest)} of {len(lengths)}." if len(lengths) > len(longest) else ""
    )
    return Chart(
        "lengths",
        "Lengths by prompt",
        "Generated tokens of each sample, prompts by falling mean length." + left_out,
        *panels_or([panel] if longest else [], "No rollout had finished when the log ended."),
    )


def _cost(log: Log) -> Chart:
    """The cost of decoding, of the last run that tells of it: measured, and learned there."""
    run = next((run for run in reversed(log.runs) if cost_curve(run.learned)), log.runs[-1])
    steps = run.steps
    decodes = steps["query_tokens"] == steps["sampling"] + np.nan_to_num(steps["drafted"])
    chosen = decodes & (steps["sampling"] > 0) & (steps["forward_ms"] > 0)
    rows, took = steps["query_tokens"][chosen], steps["forward_ms"][chosen]
    marks = []
    if len(rows):
        tops = took <= np.quantile(took, 0.97) * 1.5  # steps that the machine interrupted
        points = [[short(row), short(ms)] for row, ms in zip(rows[tops], took[tops], strict=True)]
        marks.append({"label": "each step", "points": _thinned(points), "small": True,
                      "series": _GREY})  # fmt: skip
        marks.append({"label": "median and quartiles", "points": _quartiles(rows, took),
                      "series": 0})  # fmt: skip
    lines: list[dict[str, Any]] = []
    curve = cost_curve(run.learned)
    if curve is not None:
        seen = curve.observations_R > 0
        lines.append(
            make_line("learned", curve.rows_R[seen], curve.milliseconds_R[seen], 1, dots=True)
        )
    panel = make_panel("milliseconds of a forward", lines=lines, marks=marks, height=260,
                   xLabel="query tokens of a forward: roots and draft tokens")  # fmt: skip
    return Chart(
        "cost",
        "Cost of a forward",
        "Decode-only steps, without drafting and sampling; the learned curve, with sampling, only "
        f"where it was measured.{f' Of {run.name}.' if run.name else ''}",
        *panels_or([panel], "No decode-only steps and no learned curve (spec=none learns none)."),
    )


def _quartiles(rows: np.ndarray, took: np.ndarray) -> list[list[Any]]:
    """Median and quartiles of the steps by rows: one point per count while there are few."""
    distinct = np.unique(rows)
    edges = (distinct[1:] + distinct[:-1]) / 2
    if len(distinct) > 24:
        edges = np.unique(np.quantile(rows, np.linspace(0, 1, 25)[1:-1]))
    bins = np.digitize(rows, edges)
    points: list[list[Any]] = []
    for index in np.unique(bins):
        here = bins == index
        low, middle, high = np.quantile(took[here], (0.25, 0.5, 0.75))
        row = np.median(rows[here])
        tip = f"{row:,.0f} query tokens\nmedian {middle:.2f} ms of {here.sum():,} steps"
        points.append([*map(short, (row, middle)), tip, *map(short, (low, high))])
    return points


def _calibration(log: Log) -> Chart:
    guide = {"label": "perfect", "points": [[0, 0], [1, 1]], "dashed": True, "series": _GREY}
    marks = []
    for series, run in enumerate(log.runs):
        found = calibration(run.learned)
        if found is None:
            continue
        points: list[list[Any]] = []
        of_tenths = (found.count_SK, found.expected_SK, found.accepted_SK)
        for nodes, expected, accepted in zip(*(each.sum(0) for each in of_tenths), strict=True):
            if nodes <= 0:
                continue
            estimate, share = expected / nodes, accepted / nodes
            tip = f"claimed {estimate:.0%}, accepted {share:.0%}\nof {nodes:,.0f} draft tokens"
            points.append([*map(short, (estimate, share)), tip, *_interval(share, nodes)])
        marks.append({"label": run.name or "accepted, 95 % interval", "points": points,
                      "series": series})  # fmt: skip
    panel = make_panel("share accepted", marks=marks, height=260, xLabel="claimed probability")
    panel |= {"lines": [guide], "x": {"from": 0, "to": 1}, "y": {"from": 0, "to": 1}}
    return Chart(
        "calibration",
        "Calibration",
        "Share of verified draft tokens that was accepted, by the probability that their draft "
        "claimed. The dashed "
        "line is perfect calibration.",
        *panels_or(
            [panel] if marks else [], "No draft token was verified under a learned budget, or the "
            "log ends before that was written.",
        ),
    )  # fmt: skip


def _interval(share: float, nodes: float) -> list[float | None]:
    """Wilson's score interval of a binomial share (E. B. Wilson, JASA 1927), at 95 %."""
    z = HALF_INTERVAL
    middle = (share + z**2 / (2 * nodes)) / (1 + z**2 / nodes)
    spread = math.sqrt(max(share * (1 - share), 0.0) / nodes + (z / (2 * nodes)) ** 2)
    half = z * spread / (1 + z**2 / nodes)
    return [short(min(middle - half, share)), short(max(middle + half, share))]


def _thinned(values: list[T]) -> list[T]:
    return values[:: -(-len(values) // _MAX_POINTS) or 1]
