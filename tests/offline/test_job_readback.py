"""Files that a job left behind are damaged before it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.offline import DataConfig, JobStatus, OnError, OutputError
from tests.helpers.small_jobs import output_rows, run, small_job, with_output, write_rows

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=4, n=2, seed=5)
ROWS = [{"prompt": "one two", "id": 0}, {"prompt": "", "id": 1}, {"prompt": "three", "id": 2}]
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def done(text_model_path, tmp_path_factory):
    """A job that is complete, with its output and its record."""
    config = small_job(text_model_path, tmp_path_factory.mktemp("done"), ROWS, PARAMS)
    data = DataConfig(path=config.data.path, on_error=OnError.skip)
    config = replace(config, data=data)
    run(config)
    output = Path(config.output.path or "")
    return config, output.read_bytes(), record_of(output).read_bytes()


@pytest.fixture
def config(done):
    config, output, record = done
    path = Path(config.output.path or "")
    path.write_bytes(output)
    record_of(path).write_bytes(record)
    return config


def record_of(output: Path) -> Path:
    return output.with_name(output.name + ".run.json")


def changed(**fields: Any) -> Change:
    return lambda there: there | fields


RECORDS: list[Change | bytes] = [
    b"",
    b"\xff\xfe\x00",
    b'{"format": ' + b"1" * 5000 + b"}",
    lambda record: [],
    changed(format=2),
    changed(fingerprint=[]),
    changed(complete=True),
    changed(complete={"rollouts": 4, "skipped_prompts": -1, "bytes": 1}),
]


def test_a_record_that_is_none(config):
    output, expected = Path(config.output.path or ""), output_rows(config)
    whole, before = json.loads(record_of(output).read_bytes()), output.read_bytes()
    for damage in RECORDS:
        content = damage if isinstance(damage, bytes) else json.dumps(damage(whole)).encode()
        record_of(output).write_bytes(content)
        with pytest.raises(OutputError, match=r"run\.json is not the record .*overwrite=true"):
            run(config)
        assert output.read_bytes() == before
    assert run(with_output(config, overwrite=True)).status is JobStatus.COMPLETED
    assert output_rows(config) == expected


ROW_FAULTS: list[tuple[Change, str]] = [
    (changed(prompt_index="4"), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=-1), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=3), "is no rollout of this run"),
    (changed(prompt_index=1), "is no rollout of this run"),  # of a prompt that is skipped
    (changed(sample_index=2), "is no rollout of this run"),
    (changed(prompt_index=2, sample_index=1), "is there twice"),
    (lambda row: {}, r"is no rollout's \(Object missing required field `prompt_index`"),
    (changed(token_ids=[1.5]), r"is no rollout's \(.* at `\$\.token_ids"),
    (changed(token_ids=[]), "has 0 token_ids and "),
    (changed(weight_versions=[0] * 9), "has .* token_ids and 9 weight_versions"),
    (changed(text="\ud800"), r"is no rollout's \(.* surrogates not allowed"),
    (changed(seed=0.5), r"is no rollout's \(.* at `\$\.seed"),
]


def test_a_row_that_is_no_rollout_s(config):
    output = Path(config.output.path or "")
    rows, record = output_rows(config), json.loads(record_of(output).read_bytes())
    record_of(output).write_text(json.dumps(record | {"complete": None}))
    for change, reason in ROW_FAULTS:
        write_rows(output, [change(rows[0]), *rows[1:]])
        before = output.read_bytes()
        with pytest.raises(OutputError, match=rf"the row at byte \d+ {reason}.*take that line"):
            run(config)
        assert output.read_bytes() == before
    output.write_bytes(b"[" * 100_000 + b"\n" + before)
    with pytest.raises(OutputError, match="line 1 is not a row of a rollout"):
        run(config)
    write_rows(output, rows[1:])  # a line that was taken out is made again
    record_of(output).write_text(json.dumps(record))
    run(config)
    assert output_rows(config) == rows


def test_an_output_without_all_rollouts_is_not_called_complete(config, monkeypatch):
    """An engine that loses a request ends the job, which then goes on."""
    output, expected = Path(config.output.path or ""), output_rows(config)
    record_of(output).unlink()
    output.unlink()
    real_step = RolloutEngine.step
    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", lambda engine: real_step(engine)[1:])
        with pytest.raises(OutputError, match=r"jsonl holds \d of 4 rollouts: run the same"):
            run(config)
    assert json.loads(record_of(output).read_bytes())["complete"] is None
    run(config)
    assert output_rows(config) == expected
