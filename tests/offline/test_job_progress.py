"""Progress lines, log and summary of the dataset job."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rollout.engine.worker_factory import worker_factory
from rollout.offline import LogConfig, RunConfig, run_job
from tests.helpers.small_jobs import PARAMS, output_rows, run, with_output


def test_rollouts_without_text_are_in_the_summary(config: RunConfig) -> None:
    sampling = replace(PARAMS, stop_token_ids=[2], logit_bias={2: 100.0})
    result = run(replace(config, sampling=sampling))
    assert result.summary is not None
    shown = dict(result.summary.lines())["without text"]
    assert shown.startswith("12: the model stopped at once; data.chat_template=auto puts")


def test_progress_and_summary(config: RunConfig, tmp_path: Path) -> None:
    config = replace(
        config,
        log=LogConfig(
            jsonl=str(tmp_path / "log" / "steps.jsonl"),
            every=2,
            seconds=1e-6,
            verbose=True,
            tensorboard=str(tmp_path / "events"),
        ),
    )
    terminal = Console(file=io.StringIO(), force_terminal=True, width=160)
    run_job(config, worker_factory("ngram"), terminal)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "rollouts/s",
        "tokens/s",
        "accept length",
        "ETA",
        "12/12",
        "peak memory",
        "specrollout report",
    ):
        assert text in shown
    assert "rollouts.jsonl" in shown
    assert re.search(r"loading \S*: \d+ of \d+ MiB", shown)
    lines = [json.loads(line) for line in (tmp_path / "log" / "steps.jsonl").read_text().split("\n")
             if line]  # fmt: skip
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] % 2 for step in steps] == [0] * len(steps)
    assert len(steps) >= 5
    assert list((tmp_path / "events").iterdir())
    assert {"forward_ms", "accept_length", "kv_used", "corpus/live_tokens"} <= steps[0].keys()


def test_the_log_of_a_run(config: RunConfig, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    config = replace(config, log=LogConfig(jsonl=str(log), every=7))
    run(config, "ngram")
    rows = output_rows(config)
    config = with_output(config, overwrite=True)
    run(replace(config, sampling=replace(PARAMS, n=2)))
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
    assert [len({line["group"] for line in rollouts[i : i + 3]}) for i in range(0, 12, 3)] == [
        1
    ] * 4
    assert len({line["group"] for line in rollouts}) == 4
    for line in rollouts:
        assert line["generated_tokens"] == line["verify_steps"] + line["accepted"]
        assert line["submitted_step"] <= line["step"] - line["verify_steps"]
    totals = first[-2]
    assert totals["finished"] == len(rollouts)
    for name in ("generated_tokens", "drafted", "accepted"):
        assert totals[name] == sum(line[name] for line in rollouts)
    assert sum(line["kind"] == "rollout" for line in lines[starts[1] :]) == 8


def test_progress_lines_where_there_is_no_terminal(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run(replace(config, log=LogConfig(seconds=1e-6)))
    assert "/12  " in caplog.text
    assert "accept length 1.00  ETA after the first rollouts" in caplog.text
    assert "accept length 1.00  ETA 0:0" in caplog.text
