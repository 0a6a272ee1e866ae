"""A job reports progress while it runs, and writes a log and a summary."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollout.engine.metrics import EngineMetrics
from rollout.engine.worker_factory import worker_factory
from rollout.offline import LogConfig, run_job
from rollout.offline.config import Tracker
from rollout.offline.run_log import JsonlLog
from rollout.offline.summary import Summary
from tests.helpers.small_jobs import PARAMS, output_rows, run, with_output


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_jsonl_goes_on_with_a_file(tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    for first in (0, 2):
        log = JsonlLog(path)
        for step in (first, first + 1):
            log.write("step", {"step": step, "accept_length": 1.5})
        assert len(lines_of(path)) == first + 2  # there before close
        log.close()
    lines = lines_of(path)
    assert [(line["kind"], line["step"], line["accept_length"]) for line in lines] == [
        ("step", step, 1.5) for step in range(4)
    ]
    assert lines[0]["time"] <= lines[-1]["time"]


def test_a_torn_line_and_what_json_has_no_number_for(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "step", "st')
    log = JsonlLog(path)
    log.write("learned", {"budget": {"cost": [1.0, float("nan"), float("inf")]}, "gate": (2, -1.5)})
    log.close()
    torn, whole, end = path.read_text().split("\n")
    assert (torn, end) == ('{"kind": "step", "st', "")
    line = json.loads(whole, parse_constant=pytest.fail)
    assert line["budget"] == {"cost": [1.0, None, None]}
    assert line["gate"] == [2, -1.5]


def test_progress_and_summary(config, tmp_path):
    config = replace(
        config,
        log=LogConfig(
            jsonl=str(tmp_path / "log" / "steps.jsonl"),
            every=2,
            seconds=1e-6,
            tracker=Tracker.tensorboard,
        ),
    )
    terminal = Console(file=io.StringIO(), force_terminal=True, width=160)
    run_job(config, worker_factory("ngram"), terminal)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    for text in ("rollouts/s", "tokens/s", "accept length", "ETA", "12/12",
                 "specrollout report", "rollouts.jsonl"):  # fmt: skip
        assert text in shown
    assert re.search(r"loading \S*: \d+ of \d+ MiB", shown)
    lines = map(json.loads, (tmp_path / "log" / "steps.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] % 2 for step in steps] == [0] * len(steps)
    assert len(steps) >= 5
    assert list((tmp_path / "rollouts.jsonl.tensorboard").iterdir())
    assert {"forward_ms", "accept_length", "kv_used", "corpus/live_tokens"} <= steps[0].keys()


def test_a_first_epoch_without_gain_says_what_comes_next():
    metrics = EngineMetrics(drafted=9, forecast_steps=40, plain_forecasts=20, drafting_forecasts=20,
                            gain_ms=20.0, gain_variance_ms2=900.0)  # fmt: skip
    summary = Summary(output=Path("x"), seconds=10.0, metrics=metrics, corpus_was_empty=True)
    says = "the corpus starts empty, the next epoch drafts from it"
    assert dict(summary.lines())["speculation"] == f"no measurable speedup (1.00x ± 0.01); {says}"
    summary.metrics = EngineMetrics()
    assert dict(summary.lines())["speculation"] == f"nothing was drafted; {says}"


def test_the_log_of_a_run(config, tmp_path):
    log = tmp_path / "rollouts.jsonl.log"
    config = replace(config, log=LogConfig(every=7))
    run(config, "ngram")
    rows = output_rows(config)
    config = with_output(config, overwrite=True)
    run(replace(config, sampling=replace(PARAMS, n=2)))
    run(replace(config, log=LogConfig(jsonl=None)))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    starts = [index for index, line in enumerate(lines) if line["kind"] == "run"]
    assert starts[0] == 0
    assert len(starts) == 2
    first = lines[: starts[1]]
    assert first[0]["n"] == 3
    assert first[0]["temperature"] == PARAMS.temperature
    assert first[0]["model"] == config.model.path
    assert [line["kind"] for line in first[-2:]] == ["totals", "learned"]
    rollouts = [line for line in first if line["kind"] == "rollout"]
    rollouts.sort(key=lambda line: (line["prompt_index"], line["sample_index"]))
    assert [line["generated_tokens"] for line in rollouts] == [len(r["token_ids"]) for r in rows]
    assert [line["finish_reason"] for line in rollouts] == [row["finish_reason"] for row in rows]
    assert len({(line["prompt_index"], line["group"]) for line in rollouts}) == 4
    assert len({line["group"] for line in rollouts}) == 4
    for line in rollouts:
        assert line["generated_tokens"] == line["verify_steps"] + line["accepted"]
        assert line["submitted_step"] <= line["step"] - line["verify_steps"]
    totals = first[-2]
    assert totals["finished"] == len(rollouts)
    for name in ("generated_tokens", "drafted", "accepted"):
        assert totals[name] == sum(line[name] for line in rollouts)
    assert sum(line["kind"] == "rollout" for line in lines[starts[1] :]) == 8
