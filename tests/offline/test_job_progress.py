"""A job reports time left and progress while it runs, and writes a log and a summary."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rollout.engine.metrics import EngineMetrics
from rollout.engine.worker_factory import worker_factory
from rollout.offline import LogConfig, run_job
from rollout.offline.config import Tracker
from rollout.offline.progress import TimeLeft
from rollout.offline.run_log import JsonlLog
from rollout.offline.summary import Summary
from rollout.types import FinishReason
from tests.helpers.requests import make_request
from tests.helpers.small_jobs import PARAMS, output_rows, run, with_output

LIMIT = 10_000


def running(generated: int, **params: Any):
    return make_request([1] * (3 + generated), prompt_len=3, max_new_tokens=LIMIT, **params)


def after(lengths: list[int]) -> TimeLeft:
    left = TimeLeft()
    for length in lengths:
        rollout: Any = SimpleNamespace(finish_reason=FinishReason.STOP, token_ids=[1] * length)
        left.observe(running(length), rollout)
    return left


METRICS = EngineMetrics(generated_tokens=1000, target_forwards=1000, steps=250)  # four at a time
SECONDS = 10.0


def test_nothing_is_said_before_the_first_rollouts():
    assert after([]).seconds([running(50)], 8, METRICS, SECONDS) is None
    assert after([5, 5]).seconds([running(50)], 6, METRICS, SECONDS) is None
    aborted: Any = SimpleNamespace(finish_reason=FinishReason.ABORT, token_ids=[1])
    left = after([5, 5])
    left.observe(running(1), aborted)
    assert left.seconds([running(50)], 6, METRICS, SECONDS) is None


def test_rollouts_of_one_length_take_their_tokens_over_the_throughput():
    left = after([100] * 400)
    waiting = [running(0)] * 3
    eight_more = left.seconds([*[running(60)] * 4, *waiting], 12, METRICS, SECONDS)
    assert eight_more == pytest.approx((4 * 40 + 8 * 100) / 100, rel=0.02)


def test_long_ones_that_run_make_those_to_come_longer():
    """Counts alone would say: four ended in ten seconds, so sixteen end in forty."""
    left = after([10, 10, 10, 10])
    short = left.seconds([running(5)] * 4, 16, METRICS, SECONDS)
    long = left.seconds([running(500)] * 4, 16, METRICS, SECONDS)
    assert short < 3
    assert long == pytest.approx((4 * 500 + 12 * (40 + 4 * 500) / 4) / 100)


def test_none_is_longer_than_it_may_be():
    left = after([10, 10, 10])
    few = [make_request([1] * 63, prompt_len=3, max_new_tokens=64) for _ in range(8)]
    assert left.seconds(few, 10, METRICS, SECONDS) == pytest.approx((8 * 4 + 2 * 64) / 100)


def test_the_last_ones_take_the_steps_of_the_longest():
    left = after([100] * 3 + [1100])
    last = left.seconds([running(100)], 1, METRICS, SECONDS)
    assert last == pytest.approx(1000 * 10 / 250)  # not 1000 tokens at 100 tokens/s


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
            verbose=True,
            tracker=Tracker.tensorboard,
        ),
    )
    terminal = Console(file=io.StringIO(), force_terminal=True, width=160)
    run_job(config, worker_factory("ngram"), terminal)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    for text in ("rollouts/s", "tokens/s", "accept length", "ETA", "12/12", "peak memory",
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
    metrics = EngineMetrics(drafted=9, forecast_steps=40, gain_ms=20.0, gain_variance_ms2=900.0)
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
