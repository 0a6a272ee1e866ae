"""Killed at random moments and started again, a job ends with the rows of an uninterrupted one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ngram_native import Corpus
from rollout import SamplingParams
from rollout.engine.worker_factory import worker_factory
from rollout.offline import OutputConfig, RunConfig, run_job
from tests.helpers.forked import forked
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.signalled_job import signal_after
from tests.helpers.small_jobs import output_rows, small_job

NUM_PROMPTS = 60
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=24, n=4, seed=11)


@pytest.fixture
def config(tmp_path, tiny_model_path):
    rows = [{"prompt": list(range(5, 6 + i % 5)), "id": i} for i in range(NUM_PROMPTS)]
    return small_job(tiny_model_path, tmp_path, rows, PARAMS)


def run(config: RunConfig, spec: str, killed_after: int = 0) -> None:
    signal_after(killed_after, signal.SIGKILL)
    with Path(os.devnull).open("w") as sink, contextlib.redirect_stdout(sink):
        options = {"corpus_bytes": 1 << 20} if spec == "ngram" else {}  # saved in a blink
        run_job(config, worker_factory(spec, **options), Console(file=sink))


def finish(config: RunConfig, spec: str) -> None:
    process = forked(run, config, spec)
    process.join(HANG_SECONDS)
    assert process.exitcode == 0


@pytest.mark.parametrize(("suffix", "spec"), [(".jsonl", "ngram"), (".parquet", "none")])
def test_killed_at_random_moments(config, suffix, spec):
    finish(config, "none")
    whole = output_rows(config)
    assert len(whole) == NUM_PROMPTS * PARAMS.n

    output = Path(config.output.path or "").with_name(f"killed{suffix}")
    journal = output if suffix == ".jsonl" else output.with_name(output.name + ".partial.jsonl")
    config = replace(config, output=OutputConfig(path=str(output), corpus_seconds=0.05))
    rng = random.Random(17)
    size = 0
    for after in (rng.randrange(1, 20), rng.randrange(1, 20), 0, 0, 0):
        process = forked(run, config, spec, after)
        if not after:  # anywhere, loading included
            process.join(rng.uniform(0, 1.0))
            process.kill()
        process.join(HANG_SECONDS)
        assert process.exitcode in (0, -signal.SIGKILL)
        if journal.exists():
            assert journal.stat().st_size >= size + bool(after), "something written was lost"
            size = journal.stat().st_size
    if Path(f"{output}.corpus").exists():  # killed while it was saved, it is the one before
        Corpus(max_bytes=1 << 20, vocabulary="97 tokens").load(f"{output}.corpus")
    finish(config, spec)
    finish(config, spec)  # complete: does nothing

    assert output_rows(config) == whole
    if suffix == ".parquet":
        assert pq.read_table(output).to_pylist() == whole
    names = sorted(path.name for path in output.parent.glob("killed*"))
    saved = [f"{output.name}.corpus", f"{output.name}.corpus.learned.json"]
    saved = saved if spec == "ngram" else []
    assert names == [output.name, *saved, f"{output.name}.log", f"{output.name}.run.json"]
