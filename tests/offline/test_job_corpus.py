"""The corpus beside a job's output: the job that goes on, and the next epoch, start warm."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.offline import JobResult, JobStatus, RunConfig
from rollout.offline.fingerprint import fingerprint
from tests.helpers import small_jobs
from tests.helpers.small_jobs import output_rows, small_job

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=20, n=3, seed=5, ignore_eos=True)
SPEC = {"budget": "fixed", "corpus_bytes": 1 << 20}


@pytest.fixture
def config(text_model_path, tmp_path):
    texts = ["three four five", "nine", "one two", "two one", "six seven eight"]
    return small_job(text_model_path, tmp_path, [{"prompt": text} for text in texts], PARAMS)


def run(config: RunConfig, spec: str = "ngram", **options: Any) -> JobResult:
    return small_jobs.run(config, spec, **(SPEC | options if spec == "ngram" else {}))


def stopped(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> JobResult:
    """Run until SIGTERM arrives in the middle of it."""
    real_step, seen = RolloutEngine.step, []

    def step(engine: RolloutEngine):
        seen.append(None)
        if len(seen) == 40:
            os.kill(os.getpid(), signal.SIGTERM)
        return real_step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", step)
        result = run(config)
    assert result.status is JobStatus.STOPPED
    return result


def named(config: RunConfig, name: str, **changes: Any) -> RunConfig:
    path = Path(config.output.path or "").with_name(name)
    return replace(config, output=replace(config.output, path=str(path), **changes))


def corpus_file(config: RunConfig) -> Path:
    return Path(f"{config.output.path}.corpus")


def line(result: JobResult) -> str:
    return result.summary.corpus


def accepted(result: JobResult) -> float:
    return result.summary.metrics.accepted / result.summary.metrics.generated_tokens


def test_a_stopped_job_goes_on_warm(config, monkeypatch, caplog):
    caplog.set_level("INFO")
    whole = named(config, "whole.jsonl")
    run(whole)
    first = stopped(config, monkeypatch)
    start, _, end = line(first).partition("; ")
    assert start == "cold"
    num_tokens = end.partition(" tokens now")[0]
    assert int(num_tokens) > 100
    cold = named(config, "cold.jsonl")
    for suffix in ("", ".run.json"):
        Path(f"{cold.output.path}{suffix}").write_bytes(
            Path(f"{config.output.path}{suffix}").read_bytes()
        )
    warm_result, cold_result = run(config), run(cold)
    assert line(warm_result).startswith(f"warm, {num_tokens} tokens; ")
    assert f"corpus: warm, {num_tokens} tokens" in caplog.text
    assert line(cold_result).startswith("cold; ")
    assert accepted(warm_result) > accepted(cold_result)
    assert output_rows(config) == output_rows(cold) == output_rows(whole)


def test_the_next_epoch_begins_with_the_last_ones_corpus(config):
    first = run(config)
    cold, warm = named(config, "cold.jsonl"), named(config, "warm.jsonl")
    cold_result = run(cold)
    warm_result = run(warm, corpus_path=str(corpus_file(config)))
    num_tokens = line(first).removeprefix("cold; ").partition(" tokens now")[0]
    assert line(warm_result).startswith(f"warm, {num_tokens} tokens; ")
    assert accepted(warm_result) > accepted(cold_result)
    assert cold_result.summary.corpus_was_empty
    assert not warm_result.summary.corpus_was_empty
    assert output_rows(warm) == output_rows(cold) == output_rows(config)
    # In place of its own output too: it is read before that is replaced.
    again = named(config, "rollouts.jsonl", overwrite=True)
    assert line(run(again, corpus_path=str(corpus_file(config)))).startswith("warm, ")
    assert line(run(again)).startswith("cold; ")


UNUSABLE = {
    "damaged": "the file is",
    "other corpus_bytes": "spec.corpus_bytes=1048576",
    "a folder": "Is a directory",
    "no memory": "without the earlier run's corpus: not enough memory",
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_a_corpus_that_cannot_be_used_costs_a_warning(config, monkeypatch, caplog, fault):
    def load_corpus(engine, path):
        raise MemoryError

    stopped(config, monkeypatch)
    file = corpus_file(config)
    if fault == "a folder":
        file.unlink()
        file.mkdir()
    elif fault == "damaged":
        file.write_bytes(b"")
    elif fault == "no memory":
        monkeypatch.setattr(RolloutEngine, "load_corpus", load_corpus)
    result = run(config, corpus_bytes=2 << 20 if fault == "other corpus_bytes" else 1 << 20)
    assert result.status is JobStatus.COMPLETED
    assert line(result).startswith("cold; ")
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert UNUSABLE[fault] in warnings[0]
    assert len(warnings) == 1 + (fault == "a folder")  # nor can it be saved there


def test_saved_while_it_generates(config, monkeypatch):
    saves: list[int] = []
    real_save = RolloutEngine.save_corpus

    def noted_save(engine, path):
        real_save(engine, path)
        saves.append(engine.metrics().steps)

    monkeypatch.setattr(RolloutEngine, "save_corpus", noted_save)
    left = (
        Path(f"{corpus_file(config)}.saving.abc"),
        Path(f"{corpus_file(config)}.learned.json.saving.abc"),
    )
    for path in left:
        path.write_text("of a job or a replica that was killed")
    run(named(config, "rollouts.jsonl", corpus_seconds=1e-6))
    assert len(saves) > 5
    assert saves == sorted(saves)
    assert not any(path.exists() for path in left)
    saves.clear()
    run(named(config, "seldom.jsonl"))
    assert len(saves) == 1


def test_no_corpus_where_none_is_wanted_or_there_is_none(config, monkeypatch):
    never = named(config, "rollouts.jsonl", corpus_seconds=0.0)
    stopped(never, monkeypatch)
    assert not corpus_file(config).exists()
    corpus_file(config).write_text("is not looked at")
    assert line(run(never)).startswith("cold; ")
    assert corpus_file(config).read_text() == "is not looked at"
    plain = named(config, "plain.jsonl")
    result = run(plain, "none")
    assert "corpus" not in dict(result.summary.lines())
    assert not corpus_file(plain).exists()


def test_the_corpus_is_no_part_of_what_decides_the_output(config):
    spec = {"_target_": "spec_workers.ngram.build", "corpus_path": "a", "external_corpora": {}}
    other = named(replace(config, spec=spec), "rollouts.jsonl", corpus_seconds=3.0)
    assert fingerprint(other, "hash") == fingerprint(config, "hash")
