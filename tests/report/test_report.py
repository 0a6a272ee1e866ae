"""Reports of made-up logs, whole and odd."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.errors import InvalidInputError
from rollout.report import write_report
from rollout.report.figures import figures
from rollout.report.learned import calibration, cost_curve, node_values
from rollout.report.plots import PLOTS, Picture, draw_all
from rollout.report.plots.canvas import LIGHT, render
from rollout.report.plots.over_time import MAX_BINS, Bins
from rollout.report.reading import read_log
from rollout.report.report import page
from rollout.report.run import Log
from rollout.report.tables import MAX_ROWS, groups, slowest_rollouts
from tests.helpers.run_logs import (
    STARTED,
    learned_line,
    rollout_line,
    run_line,
    run_lines,
    step_line,
    write_lines,
)

SHORT_RUN = [run_line(), rollout_line(0, 0, 5, 5, time=STARTED + 1)]
PNG = b"\x89PNG\r\n\x1a\n"


def log_of(tmp_path: Path, lines: list[dict[str, Any]]) -> Log:
    return read_log(write_lines(tmp_path / "run.jsonl", lines))


def by_name(pictures: list[Picture]) -> dict[str, Picture]:
    return {picture.plot.name: picture for picture in pictures}


# Reading


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    lines = run_lines(num_steps=60)
    log = log_of(tmp_path, lines)
    (run,) = log.runs
    steps = [line for line in lines if line["kind"] == "step"]
    assert run.num_steps == len(steps) == 60
    for name in ("query_tokens", "accepted", "total_ms", "gain_ms"):
        assert run.steps[name].tolist() == [line[name] for line in steps]
    np.testing.assert_allclose(run.step_seconds, [line["time"] - STARTED for line in steps])
    assert run.num_rollouts == 32
    assert run.settings["temperature"] == 0.7
    assert log.num_unreadable == 0
    # Every request of this log decodes from the first step on.
    np.testing.assert_allclose(run.began_seconds, 0.0, atol=1e-6)
    np.testing.assert_allclose(
        run.ended_seconds, [run.step_seconds[int(step) - 1] for step in run.rollouts["step"]]
    )


def test_torn_lines_and_unknown_kinds_do_not_count(tmp_path: Path) -> None:
    lines = [json.dumps(line).encode() for line in run_lines(num_steps=20)]
    half = lines[7][: len(lines[7]) // 2]
    odd = [
        *lines[:7], half, *lines[7:10], b'{"kind": "weather"}', b"[1, 2]", b"null", b"\xff\xfe\x00",
        b"[" * 100_000, b"", *lines[10:], lines[3][:-5],
    ]  # fmt: skip
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join(odd))
    log = read_log(path)
    assert log.num_unreadable == 7
    assert [run.num_steps for run in log.runs] == [20]
    assert "7 lines of the log could not be read" in page(log, [])


def test_what_is_no_number_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    values = ["NaN", "null", "Infinity", "true", '"12"', "[]", "9" * 400, "-3", "0.5"]
    path.write_text(
        "".join(
            f'{{"kind": "step", "step": {step}, "total_ms": {value}, "running": {value}}}\n'
            for step, value in enumerate(values)
        )
    )
    (run,) = read_log(path).runs
    known = [not math.isnan(value) for value in run.steps["total_ms"]]
    assert known == [False] * 7 + [True] * 2
    write_report(path)


def test_runs_follow_one_another_without_the_time_between(tmp_path: Path) -> None:
    first, second = run_lines(num_steps=30), run_lines(num_steps=50, started=STARTED + 1e5, seed=1)
    log = log_of(tmp_path, [*first, *second])
    assert [run.num_steps for run in log.runs] == [30, 50]
    assert log.runs[1].offset == pytest.approx(log.runs[0].seconds)
    assert log.runs[1].offset + log.runs[1].seconds < 1e3
    without_its_first_line = log_of(tmp_path, [*first, *second[1:]])
    assert [run.num_steps for run in without_its_first_line.runs] == [30, 50]


def test_runs_stopped_at_once_are_left_out(tmp_path: Path) -> None:
    log = log_of(tmp_path, [run_line(), run_line(), *run_lines(num_steps=5), run_line()])
    assert [run.num_steps for run in log.runs] == [5]
    (empty,) = log_of(tmp_path, [run_line(), run_line()]).runs
    assert (empty.num_steps, empty.num_rollouts, empty.seconds) == (0, 0, 0.0)


def test_without_clock_steps_are_summed_up(tmp_path: Path) -> None:
    lines = [{**line, "time": None} for line in run_lines(num_steps=40)]
    (run,) = log_of(tmp_path, lines).runs
    np.testing.assert_allclose(run.step_seconds, np.cumsum(run.steps["total_ms"]) / 1e3)
    assert np.isfinite(run.ended_seconds).all()


def test_a_clock_set_back_does_not_turn_time(tmp_path: Path) -> None:
    lines = run_lines(num_steps=40)
    for line in lines[20:]:
        line["time"] -= 3600
    (run,) = log_of(tmp_path, lines).runs
    assert (np.diff(run.step_seconds) >= 0).all()
    assert run.step_seconds.min() >= 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no such file"),
        ("", "it is empty"),
        ("\n\n", "it is empty"),
        ('{"prompt_index": 0, "text": "a rollout"}\n', "none of its lines is of one"),
        ("hello\n", "none of its lines is of one"),
    ],
)
def test_no_log(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInputError, match=f"log='.*run.jsonl': .*{reason}"):
        write_report(path)
    assert not (tmp_path / "run.report").exists()


# What is shown


def test_figures_are_sums_over_the_log(tmp_path: Path) -> None:
    lines = run_lines(num_steps=80)
    steps = [line for line in lines if line["kind"] == "step"]
    shown = figures(log_of(tmp_path, lines).runs[0])
    names = ("proposed", "drafted", "accepted", "generated_tokens", "sampling", "gain_ms")
    sums = {name: sum(step[name] for step in steps) for name in names}
    assert shown["nodes proposed / verified / accepted"] == (
        f"{sums['proposed']:,} / {sums['drafted']:,} / {sums['accepted']:,}"
    )
    assert shown["generated tokens"] == f"{sums['generated_tokens']:,}"
    assert shown["accept length"] == f"{sums['generated_tokens'] / sums['sampling']:.3f}"
    assert shown["gain, predicted / real"].endswith(f"/ {sums['gain_ms'] / 1e3:+.2f} s")
    assert shown["time"].startswith("forward 80.0%, draft 3.0%, sample 10.0%, schedule 2.0%")
    assert shown["settings"].startswith("spec=ngram, temperature=0.7")


def test_the_engines_totals_count_where_steps_were_left_out(tmp_path: Path) -> None:
    totals = {"kind": "totals", "steps": 300, "drafted": 77, "generated_tokens": 12345,
              "accept_length": 1.75}  # fmt: skip
    shown = figures(log_of(tmp_path, [*run_lines(num_steps=30), totals]).runs[0])
    assert shown["engine steps"] == "300, 30 of them logged"
    assert shown["generated tokens"] == "12,345"
    assert shown["accept length"] == "1.750"


def test_preemptions_of_step_lines_are_running_totals(tmp_path: Path) -> None:
    steps = [step_line(step, preemptions=so_far) for step, so_far in enumerate([0, 1, 1, 3, 3])]
    lines = [run_line(), *steps, step_line(5)]
    assert figures(log_of(tmp_path, lines).runs[0])["preemptions"] == "3"
    totals = {"kind": "totals", "preemptions": 4}
    assert figures(log_of(tmp_path, [*lines, totals]).runs[0])["preemptions"] == "4"
    ended = [{**rollout_line(0, sample, 5, 5, time=STARTED), "preemptions": 2} for sample in (0, 1)]
    assert figures(log_of(tmp_path, [run_line(), *ended]).runs[0])["preemptions"] == "4"


def test_of_a_thinned_log_without_totals_rollouts_are_counted(tmp_path: Path) -> None:
    whole = run_lines(num_steps=60)
    lines = [line for line in whole if line["kind"] != "step" or line["step"] % 5 == 0]
    rollouts = [line for line in lines if line["kind"] == "rollout"]
    log = log_of(tmp_path, lines)
    assert log.runs[0].steps_per_line == 5.0
    shown = figures(log.runs[0])
    assert shown["generated tokens"] == f"{sum(r['generated_tokens'] for r in rollouts):,}"
    assert shown["gain, predicted / real"].endswith(
        f"/ {sum(r['gain_ms'] for r in rollouts) / 1e3:+.2f} s"
    )


def test_tables_have_the_slowest_first_and_say_what_they_leave_out(tmp_path: Path) -> None:
    log = log_of(tmp_path, run_lines(num_steps=100, num_groups=70))
    slowest = slowest_rollouts(log)
    assert len(slowest.rows) == MAX_ROWS
    assert slowest.num_left_out == 280 - MAX_ROWS
    taken = [row[slowest.columns.index("seconds")].sort_by for row in slowest.rows]
    assert taken == sorted(taken, reverse=True)
    assert max(log.runs[0].ended_seconds) == pytest.approx(taken[0])
    by_group = groups(log)
    assert len(by_group.rows) == 70
    assert {row[by_group.columns.index("rollouts")].text for row in by_group.rows} == {"4"}


def test_learned_parts_may_be_missing_or_odd() -> None:
    whole = learned_line()
    curve, tenths, values = cost_curve(whole), calibration(whole), node_values(whole)
    assert curve is not None
    assert curve.milliseconds_CR.shape == (3, 6)
    assert tenths is not None
    assert tenths.count_K.sum() == 20100
    assert values is not None
    assert values.accepted_SD[0, 0] == 420
    odd: list[Any] = [None, 3, "x", [], {}, [[1, 2]], [[1], [2, 3]], {"rows": [1], "contexts": 5}]
    for read, name in ((cost_curve, "cost"), (calibration, "calibration"), (node_values, "values")):
        for each in odd:
            assert read({"budget": {**whole["budget"], name: each}}) is None
            assert read({"budget": each}) is None
        for part in ("milliseconds", "count", "accepted"):
            if part in whole["budget"][name]:
                broken = {**whole["budget"][name], part: [1, [2], None]}
                assert read({"budget": {**whole["budget"], name: broken}}) is None


@pytest.mark.parametrize("num_steps", [1, 7, MAX_BINS, MAX_BINS + 1, 4001])
def test_bins_against_slices(tmp_path: Path, num_steps: int) -> None:
    (run,) = log_of(tmp_path, run_lines(num_steps=num_steps, num_groups=2)).runs
    bins = Bins(run)
    sampled = run.steps["sampling"].copy()
    sampled[:: 5] = np.nan  # fmt: skip
    parts = np.array_split(np.arange(num_steps), len(bins.ends))
    assert len(bins.ends) == min(num_steps, MAX_BINS)
    assert bins.total(run.steps["accepted"]).sum() == run.steps["accepted"].sum()
    assert bins.ends[-1] == run.step_seconds[-1]
    sizes = bins.total(np.ones(num_steps))
    assert sizes.max() - sizes.min() <= 1
    assert len(parts) == len(sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        known = sampled[start:end][np.isfinite(sampled[start:end])]
        expected = known.mean() if len(known) else np.nan
        np.testing.assert_allclose(bins.mean(sampled)[index], expected)
        middle = np.median(known) if len(known) else np.nan
        np.testing.assert_allclose(bins.median(sampled)[index], middle)


def test_every_plot_of_a_whole_run_is_drawn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", run_lines(num_steps=60))
    report = write_report(path)
    assert [plot.name for plot in report.plots] == [f"{plot.name}.png" for plot in PLOTS]
    assert all(plot.read_bytes().startswith(PNG) for plot in report.plots)
    html = report.page.read_text()
    assert html.count("data:image/png;base64,") == 2 * len(PLOTS)  # light and dark
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", html)  # nothing but itself
    assert "http:" not in html
    assert "https:" not in html


def test_points_reach_the_cost_plot(tmp_path: Path) -> None:
    """Of steps the forward alone, as the curve is; with prefill, which has more rows than roots
    and nodes, or with no forward told they are none of its points."""
    from matplotlib.figure import Figure

    decode = step_line(1, query_tokens=9, sampling=3, drafted=6, total_ms=20.0, schedule_ms=1.0,
                       draft_ms=2.0, forward_ms=13.0, sample_ms=4.0)  # fmt: skip
    prefill = {**decode, "step": 2, "query_tokens": 64, "forward_ms": 90.0}
    untold = {**decode, "step": 3, "forward_ms": None}
    (plot,) = [plot for plot in PLOTS if plot.name == "cost"]
    figure = Figure()
    plot.draw(figure, LIGHT, log_of(tmp_path, [decode, prefill, untold]))
    points = figure.axes[0].collections[0].get_offsets()
    np.testing.assert_array_equal(np.asarray(points), [[9.0, 13.0]])
    assert figure.axes[0].get_ylabel() == "forward (ms)"


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ([run_line()], {plot.name for plot in PLOTS}),
        ([step_line(1)], {"cost", "calibration", "time", "lengths", "forecast"}),
        (
            [step_line(1, total_ms=9.0, sampling=2, generated_tokens=3, running=2)],
            {"cost", "calibration", "lengths", "forecast"},
        ),
        (run_lines(num_steps=30, spec="none"), {"calibration", "forecast"}),
        ([rollout_line(0, 0, 5, 5, time=STARTED)], {plot.name for plot in PLOTS} - {"lengths"}),
        ([learned_line()], {"accept_length", "tail", "time", "lengths", "forecast"}),
        (
            [step_line(1, running=1, total_ms=3.0), {"kind": "rollout"}, {"kind": "learned"}],
            {"cost", "calibration", "lengths", "forecast"},
        ),
    ],
    ids=[
        "no steps",
        "bare step",
        "one step",
        "none",
        "rollouts alone",
        "learned alone",
        "no fields",
    ],
)
def test_what_is_not_there_is_said_in_words(
    tmp_path: Path, lines: list[dict[str, Any]], missing: set[str]
) -> None:
    log = log_of(tmp_path, lines)
    pictures = by_name(draw_all(log))
    assert {name for name, picture in pictures.items() if picture.missing} == missing
    html = page(log, list(pictures.values()))
    for name in missing:
        assert pictures[name].missing in html
    assert html.count("<img ") == len(pictures) - len(missing)


def test_an_earlier_reports_plots_do_not_stay(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", [learned_line()])
    folder = tmp_path / "new" / "folder"
    assert (write_report(path, folder).page.parent / "calibration.png").exists()
    write_lines(path, SHORT_RUN)
    assert [plot.name for plot in write_report(path, folder).plots] == ["lengths.png"]
    assert not (folder / "calibration.png").exists()


def test_one_run_of_several(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", [*SHORT_RUN, run_line(spec="none"), *SHORT_RUN[1:]])
    assert "run 1</th>" in write_report(path).page.read_text()
    assert "spec=ngram, " not in write_report(path, run="last").page.read_text()
    assert "spec=none, " not in write_report(path, run="1").page.read_text()
    with pytest.raises(InvalidInputError, match="run='3': must be all, last or a number from 1"):
        write_report(path, run="3")


def test_what_a_log_holds_is_not_markup(tmp_path: Path) -> None:
    lines = [{**line, "model": "<script>alert(1)</script>", "finish_reason": '"><img src=x>'}
             for line in SHORT_RUN]  # fmt: skip
    html = write_report(write_lines(tmp_path / "run.jsonl", lines)).page.read_text()
    assert "<script>alert" not in html
    assert "<img src=x>" not in html


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "run.jsonl", SHORT_RUN)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"output='.*file': cannot be written: File exists"):
        write_report(path, tmp_path / "file")


def test_matplotlib_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidInputError, match=r"matplotlib.*pip install 'specrollout\[report\]'"):
        render(lambda figure, theme: None, LIGHT, (4, 3))


def test_a_hundred_thousand_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    names = ("running", "query_tokens", "sampling", "generated_tokens", "drafted", "accepted",
             "predicted_ms", "gain_ms", "total_ms", "forward_ms")  # fmt: skip
    line = json.dumps(step_line(0, **dict.fromkeys(names, 3.0)))
    with path.open("w") as file:
        for step in range(100_000):
            file.write(line.replace('"step": 0', f'"step": {step}') + "\n")
    before = time.process_time()
    report = write_report(path)
    assert time.process_time() - before < 30
    assert report.page.stat().st_size < 3_000_000
