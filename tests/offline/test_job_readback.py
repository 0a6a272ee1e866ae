"""Files that a job left behind are damaged before it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.offline import DataConfig, JobStatus, OnError, OutputError, RunConfig
from rollout.offline.journal import Journal
from tests.helpers.small_jobs import output_rows, run, small_job, with_output, write_rows

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=4, n=2, seed=5)
ROWS = [{"prompt": "one two", "id": 0}, {"prompt": "", "id": 1}, {"prompt": "three", "id": 2}]
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def done(
    text_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunConfig, bytes, bytes]:
    """A job that is complete, with its output and its record."""
    config = small_job(text_model_path, tmp_path_factory.mktemp("done"), ROWS, PARAMS)
    data = DataConfig(path=config.data.path, on_error=OnError.skip)
    config = replace(config, data=data)
    run(config)
    output = Path(config.output.path or "")
    return config, output.read_bytes(), record_of(output).read_bytes()


@pytest.fixture
def config(done: tuple[RunConfig, bytes, bytes]) -> RunConfig:
    config, output, record = done
    path = Path(config.output.path or "")
    path.write_bytes(output)
    record_of(path).write_bytes(record)
    return config


def record_of(output: Path) -> Path:
    return output.with_name(output.name + ".run.json")


def changed(**fields: Any) -> Change:
    return lambda there: there | fields


RECORDS: list[Change] = [
    lambda record: [],
    lambda record: None,
    lambda record: True,
    lambda record: 7,
    lambda record: {},
    changed(format=2),
    changed(format=None),
    changed(fingerprint=[]),
    changed(fingerprint=None),
    changed(fingerprint={}),
    changed(fingerprint="x"),
    changed(complete=[]),
    changed(complete=True),
    changed(complete={}),
    changed(complete={"rollouts": 4, "skipped_prompts": 1, "bytes": "many"}),
    changed(complete={"rollouts": True, "skipped_prompts": 1, "bytes": 1}),
    changed(complete={"rollouts": 4, "skipped_prompts": -1, "bytes": 1}),
    changed(complete={"rollouts": 4, "skipped_prompts": 1, "bytes": 1e999}),
]
TEXTS = [b"", b"\xff\xfe\x00", b"{" * 100_000, b'{"format": ' + b"1" * 5000 + b"}", b"\0" * 100]


@pytest.mark.parametrize("damage", [*RECORDS, *TEXTS], ids=range(len(RECORDS) + len(TEXTS)))
def test_a_record_that_is_none(config: RunConfig, damage: Change | bytes) -> None:
    output = Path(config.output.path or "")
    record = record_of(output)
    if isinstance(damage, bytes):
        record.write_bytes(damage)
    else:
        record.write_text(json.dumps(damage(json.loads(record.read_bytes()))))
    before = output.read_bytes()
    with pytest.raises(OutputError, match=r"run\.json is not the record of a run .*overwrite=true"):
        run(config)
    assert output.read_bytes() == before


def test_a_record_that_is_none_is_replaced_on_request(config: RunConfig) -> None:
    expected = output_rows(config)
    record_of(Path(config.output.path or "")).write_text("[]")
    assert run(with_output(config, overwrite=True)).status is JobStatus.COMPLETED
    assert output_rows(config) == expected


@pytest.mark.parametrize(
    "fingerprint",
    [changed(exact=[[1]]), changed(**{"\ud800\n": "\ud800"}), lambda there: dict.fromkeys(there)],
)
def test_a_fingerprint_with_odd_values_is_another_run_s(
    config: RunConfig, fingerprint: Change
) -> None:
    record = record_of(Path(config.output.path or ""))
    content = json.loads(record.read_bytes())
    record.write_text(json.dumps(content | {"fingerprint": fingerprint(content["fingerprint"])}))
    with pytest.raises(OutputError, match="holds rollouts of another run: ") as raised:
        run(config)
    assert str(raised.value).isprintable()


ROW_FAULTS: list[tuple[Change, str]] = [
    (changed(prompt_index="4"), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=None), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=-1), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=1.0), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=True), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=10**30), r"is no rollout's \(.* at `\$\.prompt_index"),
    (changed(prompt_index=10**15), "is no rollout of this run"),
    (changed(prompt_index=1), "is no rollout of this run"),  # of a prompt that is skipped
    (changed(sample_index=2), "is no rollout of this run"),
    (changed(sample_index=[0]), r"is no rollout's \(.* at `\$\.sample_index"),
    (changed(prompt_index=2, sample_index=1), "is there twice"),
    (lambda row: {}, r"is no rollout's \(Object missing required field `prompt_index`"),
    (
        lambda row: {name: row[name] for name in row if name != "logprobs"},
        r"is no rollout's \(Object missing required field `logprobs`",
    ),
    (changed(token_ids="abc"), r"is no rollout's \(.* at `\$\.token_ids"),
    (changed(token_ids=[1.5]), r"is no rollout's \(.* at `\$\.token_ids"),
    (changed(token_ids=[True]), r"is no rollout's \(.* at `\$\.token_ids"),
    (changed(token_ids=[10**12]), r"is no rollout's \(.* at `\$\.token_ids"),
    (changed(token_ids=[]), "has 0 token_ids and "),
    (changed(logprobs=[None]), r"is no rollout's \(.* at `\$\.logprobs"),
    (changed(logprobs=None), r"is no rollout's \(.* at `\$\.logprobs"),
    (changed(weight_versions=[0] * 9), "has .* token_ids and 9 weight_versions"),
    (changed(text=3), r"is no rollout's \(.* at `\$\.text"),
    (changed(text="\ud800"), r"is no rollout's \(.* surrogates not allowed"),
    (changed(finish_reason=[]), r"is no rollout's \(.* at `\$\.finish_reason"),
    (changed(seed=-1), r"is no rollout's \(.* at `\$\.seed"),
]


@pytest.mark.parametrize(("change", "reason"), ROW_FAULTS)
def test_a_row_that_is_no_rollout_s(config: RunConfig, change: Change, reason: str) -> None:
    output = Path(config.output.path or "")
    rows, record = output_rows(config), json.loads(record_of(output).read_bytes())
    write_rows(output, [change(rows[0]), *rows[1:]])
    record_of(output).write_text(json.dumps(record | {"complete": None}))
    before = output.read_bytes()
    with pytest.raises(OutputError, match=rf"jsonl: the row at byte \d+ {reason}.*take that line"):
        run(config)
    assert output.read_bytes() == before


def test_a_line_that_was_taken_out_is_made_again(config: RunConfig) -> None:
    rows = output_rows(config)
    write_rows(Path(config.output.path or ""), [{"token_ids": 3}, *rows[1:]])
    with pytest.raises(OutputError, match="take that line out"):
        run(config)
    write_rows(Path(config.output.path or ""), rows[1:])
    run(config)
    assert output_rows(config) == rows


def test_a_line_nested_too_deep_is_no_row(config: RunConfig) -> None:
    output = Path(config.output.path or "")
    output.write_bytes(b"[" * 100_000 + b"\n" + output.read_bytes())
    with pytest.raises(OutputError, match="line 1 is not a row of a rollout"):
        run(config)


def test_an_output_without_all_rollouts_is_not_called_complete(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(0)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"{}\n")


def put_another_in_its_place(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


@pytest.mark.parametrize("change", [cut, append, put_another_in_its_place, move, Path.unlink])
@pytest.mark.parametrize("at_end", [False, True])
def test_an_output_that_others_change_meanwhile(
    tmp_path: Path, change: Callable[[Path], None], at_end: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    journal.append(b'{"number": 1}\n')
    change(path)
    end = journal.close if at_end else lambda: journal.append(b'{"number": 2}\n')
    with pytest.raises(OutputError, match=r"rows\.jsonl was changed or moved by another process"):
        end()
    if not at_end:
        journal.close()
