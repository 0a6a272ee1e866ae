"""The dataset job on a tiny engine: the rows it writes, and those it skips."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout import RolloutEngine
from rollout.config import MemoryConfig, SchedulerConfig
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.offline import DataConfig, JobStatus, OnError, RunConfig, prompt_tokens
from rollout.types import Rollout
from tests.helpers.small_jobs import (
    CHAT,
    PARAMS,
    PROMPTS,
    output_rows,
    run,
    with_output,
    write_rows,
)

BROKEN = [
    {"prompt": "three four five", "answer": 12},
    {"prompt": [5, 97], "answer": 1},  # the vocabulary has 97 tokens
    {"prompt": [{"role": "user", "content": "one two"}], "answer": 3},
    {"prompt": "one " * 200, "answer": 2},  # the context has 128
    {"prompt": "", "answer": 0},
    {"prompt": "nine", "answer": 9},
]


def direct_rollouts(config: RunConfig) -> list[Rollout]:
    engine = RolloutEngine.from_config(config.engine, worker_factory("none"))
    return engine.generate([row["prompt"] for row in PROMPTS], config.sampling)


def test_rows_are_those_of_generate(config):
    result = run(config)
    assert result.status is JobStatus.COMPLETED
    assert result.summary.rollouts == 12
    expected = [
        {
            "prompt_index": rollout.prompt_index,
            "sample_index": rollout.sample_index,
            "text": rollout.text,
            "token_ids": rollout.token_ids,
            "logprobs": rollout.logprobs,
            "weight_versions": rollout.weight_versions,
            "finish_reason": rollout.finish_reason.value,
            "seed": rollout.seed,
            **PROMPTS[rollout.prompt_index],
        }
        for rollout in direct_rollouts(config)
    ]
    assert output_rows(config) == expected
    seeds = [row["seed"] for row in expected]  # int64 to whoever reads the JSON
    assert -(2**63) <= min(seeds) < 0 < max(seeds) < 2**63


def test_extra_numbers_on_request(config):
    params = replace(
        PARAMS, n=1, raw_logprobs=True, sampling_logprobs=True, top_logprobs=2, entropy=True
    )
    write_rows(Path(config.data.path), [{"prompt": "three four five"}])
    config = with_output(replace(config, sampling=params), prompt_ids=True, stats=True)
    parquet = with_output(config, path=str(Path(config.output.path or "").with_suffix(".parquet")))
    rollout = direct_rollouts(config)[0]
    for each in (config, parquet):
        run(each)
        (row,) = output_rows(each)
        assert row["prompt_ids"] == rollout.prompt_ids
        assert row["raw_logprobs"] == rollout.extras.raw_logprobs
        assert row["sampling_logprobs"] == rollout.extras.sampling_logprobs
        assert row["entropies"] == rollout.extras.entropies
        top = [[(t["token_id"], t["logprob"]) for t in each] for each in row["top_logprobs"]]
        assert top == [list(map(tuple, each)) for each in rollout.extras.top_logprobs]
        assert row["stats"] == {
            "accept_length": 1.0,
            "verify_steps": len(rollout.token_ids),
            "drafted": 0,
            "accepted": 0,
        }


def test_speculation_and_scheduling_cannot_be_seen(config, tmp_path):
    run(config)
    other = with_output(config, path=str(tmp_path / "other.jsonl"))
    run(replace(other, scheduler=SchedulerConfig(max_running=2, max_step_tokens=3)), spec="ngram")
    assert output_rows(other) == output_rows(config)


def test_broken_rows_stop_the_job_before_any_work(config):
    write_rows(Path(config.data.path), BROKEN)
    with pytest.raises(InvalidInputError, match=r"1 of 6 rows .*:\n  line 5 prompt is empty\nfix"):
        run(config)
    write_rows(Path(config.data.path), [row for row in BROKEN if row["prompt"]])
    with pytest.raises(InvalidInputError, match="2 of 5 rows cannot be used") as tokens:
        run(config)
    for text in ("line 2 prompt=97: token ids must be in", "line 4 ", "data.on_error=skip"):
        assert text in str(tokens.value)
    assert os.listdir(Path(config.output.path or "").parent) == ["prompts.jsonl"]


def test_broken_rows_are_skipped_and_change_nothing_else(config, caplog):
    data = replace(config.data, on_error=OnError.skip)
    write_rows(Path(config.data.path), BROKEN)
    result = run(replace(config, data=data))
    assert result.summary.skipped_prompts == 3
    skipping = output_rows(config)
    assert {row["prompt_index"] for row in skipping} == {0, 2, 5}
    assert "skipped 1 rows" in caplog.text
    assert "line 5 prompt is empty" in caplog.text
    assert "skipped 2 rows" in caplog.text
    assert run(replace(config, data=data)).status is JobStatus.NOTHING_TO_DO
    good = [row if row["prompt"] in ("nine", CHAT, "three four five") else {"prompt": "one"}
            for row in BROKEN]  # fmt: skip
    write_rows(Path(config.data.path), good)
    run(with_output(config, overwrite=True))
    whole = [row for row in output_rows(config) if row["prompt_index"] in (0, 2, 5)]
    assert whole == skipping


def test_a_row_far_behind_that_is_broken_loses_nothing(config, monkeypatch):
    """It is found when generation comes near it: long files are not encoded beforehand."""
    monkeypatch.setattr(prompt_tokens, "_FIRST", 2)
    monkeypatch.setattr(prompt_tokens, "_BLOCK", 1)
    rows = [{"prompt": "one"}] * 8 + [{"prompt": [97]}] + [{"prompt": "two"}] * 2
    write_rows(Path(config.data.path), rows)
    with pytest.raises(
        InvalidInputError, match=r"1 of 11 rows cannot be used:\n  line 9 prompt=97"
    ):
        run(config)
    made = output_rows(config)
    assert len(made) >= 3
    skipping = replace(config, data=replace(config.data, on_error=OnError.skip))
    result = run(skipping)
    assert (result.summary.resumed, result.summary.skipped_prompts) == (len(made), 1)
    whole = output_rows(config)
    assert {row["prompt_index"] for row in whole} == {*range(11)} - {8}
    assert all(row in whole for row in made)
    monkeypatch.undo()
    run(with_output(skipping, overwrite=True))
    assert output_rows(config) == whole


def test_a_budget_too_small_for_a_prompt_names_its_line(config):
    config = replace(config, memory=MemoryConfig(max_kv_tokens=16))
    write_rows(Path(config.data.path), [{"prompt": "one"}, {"prompt": "one " * 40}])
    with pytest.raises(OutOfMemoryError, match=r"line 2: .*40 tokens.*memory.kv_bytes"):
        run(config)
    write_rows(Path(config.data.path), [{"prompt": "one"}, {"prompt": "one " * 5}])
    with pytest.raises(OutOfMemoryError, match=r"line 2: .*5 tokens, .* needs 17 KV slots"):
        run(config)
    assert run(replace(config, memory=MemoryConfig(max_kv_tokens=18))).summary is not None
    with pytest.raises(OutOfMemoryError, match=r"memory.kv_bytes=1 "):
        run(with_output(replace(config, memory=MemoryConfig(kv_bytes=1)), overwrite=True))
    assert len(output_rows(config)) == 6  # what is there is replaced only when all is well


def test_wrong_sampling_and_columns_that_would_be_there_twice(config):
    sampling = replace(PARAMS, allowed_token_ids=[97])
    with pytest.raises(InvalidInputError, match=r"^sampling.allowed_token_ids=97"):
        run(replace(config, sampling=sampling))
    write_rows(Path(config.data.path), [{"prompt": "one", "seed": 3, "text": "x", "id": 1}])
    with pytest.raises(InvalidInputError, match=r"line 1 has columns .*: seed, text; rename"):
        run(config)
    run(replace(config, data=replace(config.data, columns=["id"])))
    assert output_rows(config)[0]["id"] == 1


def test_parquet_in_and_out_keeps_types_and_order(config, tmp_path):
    path = tmp_path / "prompts.parquet"
    table = pa.table(
        {
            "messages": [CHAT, [{"role": "system", "content": "six"}, *CHAT]],
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "code": pa.array([b"\x00", None], pa.binary()),
            "small": pa.array([1, 2], pa.int8()),
        }
    )
    pq.write_table(table, path)
    config = replace(config, data=DataConfig(path=str(path)))
    run(with_output(config, path=str(tmp_path / "out.parquet")))
    run(config)
    out = pq.read_table(tmp_path / "out.parquet")
    for name in ("when", "code", "small"):
        assert out.schema.field(name).type == table.schema.field(name).type
        assert out.column(name).to_pylist()[::3] == table.column(name).to_pylist()
    assert out.column("prompt").to_pylist()[0] == CHAT
    as_json = output_rows(config)
    assert as_json[0]["when"] == "1970-01-01T00:00:00Z"
    assert (as_json[0]["code"], as_json[3]["code"]) == ("AA==", None)
    for name in ("sample_index", "text", "token_ids", "logprobs", "seed", "finish_reason"):
        assert out.column(name).to_pylist() == [row[name] for row in as_json]
    files = [f"out.parquet{suffix}" for suffix in ("", ".log", ".run.json")]
    assert sorted(path.name for path in tmp_path.glob("out*")) == files


def test_columns_that_make_no_parquet_are_named_before_any_work(config, tmp_path):
    config = with_output(config, path=str(tmp_path / "out.parquet"))
    with pytest.raises(InvalidInputError, match="'prompt' cannot be stored as Parquet"):
        run(config)
    for wrong in ([None, 1, "x"], [["x"], [], [1]], [{}, {}], [2**70, 1]):
        write_rows(Path(config.data.path), [{"prompt": "one", "x": value} for value in wrong])
        refusal = "column 'x' cannot be stored as Parquet.*data.columns"
        with pytest.raises(InvalidInputError, match=refusal):
            run(config)
    rows = [
        {"prompt": "one", "x": 1, "y": None, "w": [None, "a"]},
        {"prompt": "one", "x": 2.5, "z": {"a": 1}, "w": ["b"]},
    ]
    write_rows(Path(config.data.path), rows)
    run(config)
    out = output_rows(config)[::3]
    assert [row["x"] for row in out] == [1.0, 2.5]
    assert [row["w"] for row in out] == [[None, "a"], ["b"]]
    assert [row["z"] for row in out] == [None, {"a": 1}]


def test_long_files_are_submitted_piece_by_piece(config, monkeypatch):
    write_rows(Path(config.data.path), [{"prompt": "one"}] * 12)
    config = replace(config, scheduler=SchedulerConfig(max_running=2, max_step_tokens=16))
    unfinished = []
    real_step = RolloutEngine.step

    def step(engine):
        unfinished.append(engine.scheduler.num_running + engine.scheduler.num_waiting)
        return real_step(engine)

    monkeypatch.setattr(RolloutEngine, "step", step)
    run(config)
    assert max(unfinished) == 8
    assert len(output_rows(config)) == 36
