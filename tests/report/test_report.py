"""Reports of made-up logs, whole and odd."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollout.errors import InvalidInputError
from rollout.report import write_report
from rollout.report.charts import charts
from rollout.report.key_figures import figures, name_runs
from rollout.report.log_reader import read_log
from rollout.report.panels import Chart
from rollout.report.report import MAX_RUNS
from rollout.report.rollout_texts import RolloutTexts
from rollout.report.run import Log
from rollout.report.verdict import print_verdicts, verdicts
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
CHARTS = {"over_time", "saved", "lengths", "cost", "calibration", "last"}


def log_of(tmp_path: Path, lines: list[dict[str, Any]]) -> Log:
    return read_log(write_lines(tmp_path / "run.jsonl", lines))


def charts_of(log: Log) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(log, RolloutTexts(log.runs))}


def html_of(*paths: Path, **options: Any) -> str:
    return write_report(paths, **options)[0].read_text()


def totals_line(**values: float) -> dict[str, Any]:
    return {"kind": "totals", "time": STARTED + 10, "forecast_steps": 90, "plain_forecasts": 9,
            "drafting_forecasts": 81, **values}  # fmt: skip


# Reading


def test_a_whole_run_is_read(tmp_path):
    lines = run_lines(num_steps=60)
    log = log_of(tmp_path, lines)
    (run,) = log.runs
    steps = [line for line in lines if line["kind"] == "step"]
    assert run.num_steps == len(steps) == 60
    for name in ("query_tokens", "accepted", "total_ms"):
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


def test_torn_lines_unknown_kinds_and_what_is_no_number_do_not_count(tmp_path):
    lines = [json.dumps(line).encode() for line in run_lines(num_steps=20)]
    odd = [
        lines[7][:30],
        b'{"kind": "weather"}',
        b"[1, 2]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join([*lines[:7], *odd, b"", *lines[7:], lines[3][:-5]]))
    log = read_log(path)
    assert log.num_unreadable == 7
    assert [run.num_steps for run in log.runs] == [20]
    assert "7 lines of the log could not be read" in html_of(path)
    values = ["NaN", "null", "Infinity", "true", '"12"', "[]", "9" * 400, "1e300", "-3", "0.5"]
    path.write_text(
        "".join(
            f'{{"kind": "step", "step": {step}, "total_ms": {value}, "running": {value}}}\n'
            for step, value in enumerate(values)
        )
    )
    (run,) = read_log(path).runs
    known = [not math.isnan(value) for value in run.steps["total_ms"]]
    assert known == [False] * 8 + [True] * 2
    print_verdicts(Console(file=io.StringIO()), write_report([path])[1])


def test_runs_of_one_file_each_begin_at_their_own_start(tmp_path):
    first, second = run_lines(num_steps=30), run_lines(num_steps=50, started=STARTED + 1e5, seed=1)
    for lines in ([*first, *second], [*first, run_line(), *second]):
        runs = log_of(tmp_path, lines).runs
        assert [run.num_steps for run in runs] == [30, 50]
        assert all(run.seconds < 1e3 for run in runs)
    (empty,) = log_of(tmp_path, [run_line(), run_line()]).runs
    assert (empty.num_steps, empty.num_rollouts, empty.seconds) == (0, 0, 0.0)


def test_no_log(tmp_path):
    path = tmp_path / "run.jsonl"
    for content, reason in (
        (None, "there is no such file"),
        ("\n\n", "it is empty"),
        ('{"prompt_index": 0, "text": "a rollout"}\n', "none of its lines is of one"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(InvalidInputError, match=f"log='.*run.jsonl': .*{reason}"):
            write_report([path])
        assert not (tmp_path / "run.html").exists()


# What is shown


def test_figures_are_sums_over_the_log(tmp_path):
    lines = run_lines(num_steps=80)
    steps = [line for line in lines if line["kind"] == "step"]
    shown = figures(log_of(tmp_path, lines).runs[0])
    names = ("proposed", "drafted", "accepted", "generated_tokens", "sampling")
    sums = {name: sum(step[name] for step in steps) for name in names}
    assert shown["draft tokens proposed / verified / accepted"] == (
        f"{sums['proposed']:,} / {sums['drafted']:,} / {sums['accepted']:,}"
    )
    assert shown["generated tokens"] == f"{sums['generated_tokens']:,}"
    assert shown["accept length"] == f"{sums['generated_tokens'] / sums['sampling']:.3f}"
    assert shown["settings"].startswith("n-gram drafts, temperature 0.7")


def test_a_page_holds_all_it_needs(tmp_path):
    html = html_of(write_lines(tmp_path / "run.jsonl", saved_run()))
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", html)  # nothing but itself
    assert html.count("https:") == 0
    assert html.count("http:") == html.count("http://www.w3.org/2000/svg") == 1
    assert "unsafe" not in html.split("<title>")[0]
    for name in CHARTS:
        assert f'<section id="{name}">' in html
    panels = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert len(panels) == 3 + 5
    for panel in panels:
        json.loads(panel, parse_constant=pytest.fail)


def saved_run(**options: Any) -> list[dict[str, Any]]:
    """A whole run whose steps tell what was saved so far."""
    lines = run_lines(num_steps=60, **options)
    for line in lines:
        if line["kind"] == "step":
            line |= {"saved_seconds": 0.01 * line["step"], "saved_error_seconds": 0.2}
    return lines


WITHOUT: list[tuple[list[dict[str, Any]], set[str]]] = [
    ([run_line()], CHARTS),
    ([step_line(1)], CHARTS),
    (
        [run_line(), step_line(1, time=STARTED + 1, sampling=2, generated_tokens=3)],
        CHARTS - {"over_time"},
    ),
    (run_lines(num_steps=30, spec="none"), {"calibration", "saved"}),
    ([rollout_line(0, 0, 5, 5, time=STARTED)], CHARTS - {"lengths"}),
    ([learned_line()], CHARTS - {"cost", "calibration"}),
    ([step_line(1), {"kind": "rollout"}, {"kind": "learned"}], CHARTS),
]


def test_what_is_not_there_is_said_in_words(tmp_path):
    for lines, missing in WITHOUT:
        path = write_lines(tmp_path / "run.jsonl", lines)
        found = charts_of(read_log(path))
        assert {name for name, chart in found.items() if chart.missing} == missing
        assert {name for name, chart in found.items() if not chart.panels} == missing
        html = html_of(path)
        for name in missing:
            assert found[name].missing in html


def test_ratios_to_few_expected_draft_tokens_are_not_shown(tmp_path):
    none = [0.0] * 9
    table = {"sources": ["live", "gap"], "count": [[80, *none], [4, *none]],
             "expected": [[40.0, *none], [0.4, *none]],
             "accepted": [[30.0, *none], [1.0, *none]]}  # fmt: skip
    lines = [run_line(), {"kind": "learned", "budget": {"calibration": table}}]
    html = html_of(write_lines(tmp_path / "run.jsonl", lines))
    assert "30 of 40, 0.75x" in html
    assert "1 of 0" not in html


# The verdict


def test_the_verdict_in_the_terminal_is_that_of_the_page(tmp_path):
    for saved_ms, says in (
        (2000.0, "1.20x ± 0.10 over plain decoding (+2.0 s ± 1.0)."),
        (-2000.0, "0.80x ± 0.10 over plain decoding (-2.0 s ± 1.0)."),
        (500.0, "Inconclusive: 1.05x ± 0.10 against plain decoding."),
    ):
        lines = [
            run_line(),
            step_line(10, sampling=100, generated_tokens=150, drafted=80),
            totals_line(gain_ms=saved_ms, gain_variance_ms2=(1000.0 / 1.96) ** 2, drafted=80,
                        generated_tokens=600, accept_length=1.5, forward_ms=6000.0, draft_ms=1000.0,
                        sample_ms=500.0, schedule_ms=300.0, total_ms=8000.0),
        ]  # fmt: skip
        page, found = write_report([write_lines(tmp_path / "run.jsonl", lines)])
        terminal = io.StringIO()
        print_verdicts(Console(file=terminal, width=200), found)
        shown = ["forward 60.0%", "drafting 10.0%", "sampling 5.0%", "scheduling 3.0%",
                 "rest of steps 2.0%", "between steps 20.0%"]  # fmt: skip
        for text in (terminal.getvalue(), page.read_text()):
            for expected in (says, *shown, "accept length", "1.50", "tokens/s"):
                assert expected in text
        assert dict(found[0].facts)["tokens/s"] == "60"


def test_a_verdict_says_what_it_cannot_know(tmp_path):
    def sentence(*lines):
        return verdicts(log_of(tmp_path, [run_line(), *lines]).runs)[0].sentence

    assert "Nothing was drafted" in sentence(step_line(1, drafted=0))
    assert "was not measured" in sentence(step_line(1, drafted=3))
    assert "was not measured" in sentence(
        totals_line(drafted=3, gain_ms=0.0, gain_variance_ms2=0.0) | {"forecast_steps": 0}
    )
    assert "too few steps" in sentence(totals_line(drafted=3, gain_ms=9.0, plain_forecasts=4))
    # A run that was killed has no totals yet.
    told = step_line(8, drafted=3, saved_seconds=4.0, saved_error_seconds=1.0)
    assert "1.50x ± 0.12 over plain decoding" in sentence(told)


# Several runs


def test_runs_of_two_logs_are_named_by_what_differs(tmp_path):
    plain = write_lines(tmp_path / "a.jsonl", run_lines(num_steps=20, spec="none"))
    drafting = write_lines(tmp_path / "b.jsonl", saved_run(started=STARTED + 1e6))
    page, found = write_report([plain, drafting])
    assert page == tmp_path / "a.html"
    assert [verdict.name for verdict in found] == ["no drafts (a)", "n-gram drafts (b)"]
    assert "x the tokens/s of no drafts (a)" in found[1].sentence
    html = page.read_text()
    panel = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', html)[0])
    assert [line["label"] for line in panel["lines"]] == ["no drafts (a)", "n-gram drafts (b)"]
    assert all(line["points"][0][0] < 1 for line in panel["lines"])  # from their own starts
    names = read_log(plain).runs + read_log(plain).runs
    name_runs(names)
    assert [run.name for run in names] == ["run 1", "run 1"]


def test_one_run_of_several_or_the_last(tmp_path):
    path = write_lines(tmp_path / "run.jsonl", [*SHORT_RUN, run_line(spec="none"), *SHORT_RUN[1:]])
    assert "no drafts (run 2)</th>" in html_of(path)
    assert "n-gram drafts" not in html_of(path, run="last")
    assert "no drafts," not in html_of(path, run="1")
    with pytest.raises(InvalidInputError, match="run='3': must be all, last or a number from 1"):
        write_report([path], run="3")
    html = html_of(write_lines(path, SHORT_RUN * (MAX_RUNS + 2)))
    assert f"The last {MAX_RUNS} runs; --run N shows one of the 2 before them" in html
    assert html.count('<section class="verdict">') == MAX_RUNS


# Texts of prompts and rollouts


def with_output(tmp_path: Path, rows: list[bytes], lines: list[dict[str, Any]]) -> Path:
    output = tmp_path / "rollouts.jsonl"
    output.write_bytes(b"\n".join(rows))
    lines = [{**line, "output": str(output)} if line["kind"] == "run" else line for line in lines]
    return write_lines(tmp_path / "run.jsonl", lines)


def row_of(prompt: int, sample: int, /, **values: Any) -> bytes:
    return json.dumps({"prompt_index": prompt, "sample_index": sample, **values}).encode()


def test_rollouts_can_be_read(tmp_path):
    rows = [
        b'{"prompt_index": 0, "sample_index": 0, torn',
        b"[1]",
        row_of(0, 0, text="four", prompt="two and two?", reward=0.75),
        row_of(0, 1, text="five", prompt=[{"role": "system", "content": "Add."},
                                         {"role": "user", "content": "two\nand three?"}]),
        row_of(1, 0, text=None, token_ids=[7, 8], prompt_ids=[5, 6], score=1),
        row_of(9, 9, text="another run's"),
    ]  # fmt: skip
    ended = [rollout_line(*place, 5, 5, time=STARTED) for place in ((0, 0), (0, 1), (1, 0), (2, 0))]
    path = with_output(tmp_path, rows, [run_line(), *ended])
    log = read_log(path)
    texts = RolloutTexts(log.runs)
    found = [texts.of(log.runs[0], index) for index in range(4)]
    assert [each and each.text for each in found] == ["four", "five", "token ids [7, 8]", None]
    assert [each and each.reward for each in found] == [0.75, None, 1.0, None]
    assert found[1].prompt == "system: Add.\nuser: two\nand three?"
    assert texts.title(log.runs[0], 2) == "1: token ids [5, 6]"
    assert texts.title(log.runs[0], 3) == "2"
    html = html_of(path)
    for expected in ("two and two?", "four", "0.75", "prompt.sample"):
        assert expected in html
    assert "another run" not in html


def test_what_a_log_and_an_output_hold_is_not_markup_and_is_cut(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>]]>--><!--\u2028\"'\ud800"
    lines = [{**line, "model": evil, "finish_reason": evil, "group": evil} for line in SHORT_RUN]
    row = row_of(0, 0, text=evil + "x" * 2**20, prompt=evil + "y" * 2**20)
    html = html_of(with_output(tmp_path, [row], lines))
    assert html.count("</script>") == html.count("<script")
    for markup in ("<script>alert", "<img", "<!--", "-->"):
        assert markup not in html
    assert html.count("alert(1)") > 5
    assert "more letters)" in html
    assert len(html) < 100_000


def test_a_page_replaces_nothing_but_a_page(tmp_path):
    """A log may be called run.html, and rollouts were dear to make."""
    log, rows = write_lines(tmp_path / "run.html", SHORT_RUN), tmp_path / "rollouts.jsonl"
    rows.write_bytes(row_of(0, 0))
    for output, name in ((None, "run.html"), (rows, "rollouts.jsonl")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(
            InvalidInputError, match=rf"output='.*{name}': exists and is not a report"
        ):
            write_report([log], output)
        assert (tmp_path / name).read_bytes() == before
    page, _ = write_report([log], tmp_path / "page.html")
    assert write_report([log, log], page)[0].read_text().startswith("<!doctype html>")
    with pytest.raises(InvalidInputError, match=r"output='.*page': cannot be written"):
        write_report([log], rows / "page")


def test_names_of_runs_are_printable(tmp_path):
    """They reach a terminal, for which some letters are commands."""
    lines = [{**run_line(), "model": "\x1b[2Jevil\ud800"}, *SHORT_RUN[1:], *SHORT_RUN]
    _, found = write_report([write_lines(tmp_path / "run.jsonl", lines)])
    assert found[0].name == "\ufffd[2Jevil\ufffd (run 1)"
