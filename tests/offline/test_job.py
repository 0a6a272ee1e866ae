"""The dataset job on a tiny engine: the rows it writes, and those it skips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout import RolloutEngine
from rollout.config import DType, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.engine.tokenizer import PromptEncoder
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.offline import DataConfig, JobStatus, OnError, RunConfig
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
from tests.helpers.tiny_moe import save_tiny_moe

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


def test_rows_are_those_of_generate(config: RunConfig) -> None:
    result = run(config)
    assert result.status is JobStatus.COMPLETED
    assert result.summary is not None
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


def test_a_prompt_is_tokenized_once(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked prompts are the ones that run, so the work of a long file is done once."""
    encoded = []
    real_encode = PromptEncoder.encode

    def encode(encoder: PromptEncoder, prompt: Any, *args: Any, **options: Any) -> list[int]:
        if isinstance(prompt, str):
            encoded.append(prompt)
        return real_encode(encoder, prompt, *args, **options)

    monkeypatch.setattr(PromptEncoder, "encode", encode)
    texts = ["one two", "three", "four five six"]
    write_rows(Path(config.data.path), [{"prompt": text} for text in texts])
    config = with_output(replace(config, sampling=replace(PARAMS, n=2)), prompt_ids=True)
    run(config)
    assert encoded == texts
    lengths = [len(row["prompt_ids"]) for row in output_rows(config)]
    assert lengths == [2, 2, 1, 1, 3, 3]


def test_extra_numbers_on_request(config: RunConfig) -> None:
    params = replace(
        PARAMS, n=1, raw_logprobs=True, sampling_logprobs=True, top_logprobs=2, entropy=True
    )
    config = with_output(replace(config, sampling=params), prompt_ids=True, stats=True)
    parquet = with_output(config, path=str(Path(config.output.path or "").with_suffix(".parquet")))
    rollouts = direct_rollouts(config)
    for each in (config, parquet):
        each = replace(each, data=replace(each.data, columns=[], on_error=OnError.skip))
        mixed = [row for row in PROMPTS if isinstance(row["prompt"], str)]
        if each is not config:
            write_rows(Path(config.data.path), mixed)
        run(each)
        row = output_rows(each)[0]
        assert row["prompt_ids"] == rollouts[0].prompt_ids
        assert row["raw_logprobs"] == rollouts[0].extras.raw_logprobs
        assert row["sampling_logprobs"] == rollouts[0].extras.sampling_logprobs
        assert row["entropies"] == rollouts[0].extras.entropies
        top = [[(t["token_id"], t["logprob"]) for t in each] for each in row["top_logprobs"]]
        assert top == [list(map(tuple, each)) for each in rollouts[0].extras.top_logprobs]
        assert row["stats"] == {
            "accept_length": 1.0,
            "verify_steps": len(rollouts[0].token_ids),
            "drafted": 0,
            "accepted": 0,
        }


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_routes_on_request(config: RunConfig, tmp_path: Path, suffix: str) -> None:
    folder = save_tiny_moe(tmp_path / "moe")
    config = with_output(config, path=str(tmp_path / f"out{suffix}"))
    config = replace(
        config,
        model=ModelConfig(path=str(folder), dtype=DType.float32, record_routes=True),
        data=DataConfig(path=write_rows(tmp_path / "ids.jsonl", [{"prompt": [5, 6, 7]}])),
        sampling=replace(PARAMS, routed_experts=True, n=1),
    )
    run(config)
    (row,) = output_rows(config)
    engine = RolloutEngine.from_config(config.engine, worker_factory("none"))
    (rollout,) = engine.generate([[5, 6, 7]], config.sampling)
    assert row["routed_experts"] == rollout.routed_experts.tolist()
    assert len(row["routed_experts"]) == 3 + len(row["token_ids"]) - 1


def test_speculation_and_scheduling_cannot_be_seen(config: RunConfig, tmp_path: Path) -> None:
    run(config)
    other = with_output(config, path=str(tmp_path / "other.jsonl"))
    run(replace(other, scheduler=SchedulerConfig(max_running=2, max_step_tokens=3)), spec="ngram")
    assert output_rows(other) == output_rows(config)


def test_broken_rows_stop_the_job_before_any_work(config: RunConfig) -> None:
    write_rows(Path(config.data.path), BROKEN)
    with pytest.raises(InvalidInputError) as parsing:
        run(config)
    assert "1 of 6 rows cannot be used:\n  line 5 prompt is empty\nmend" in str(parsing.value)
    write_rows(Path(config.data.path), [row for row in BROKEN if row["prompt"]])
    with pytest.raises(InvalidInputError) as tokens:
        run(config)
    message = str(tokens.value)
    assert "2 of 5 rows cannot be used" in message
    assert "line 2 prompt=97: token ids must be in [0, 97)" in message
    assert "line 4 " in message
    assert "data.on_error=skip" in message
    folder = Path(config.output.path or "").parent
    assert [path.name for path in folder.iterdir()] == ["prompts.jsonl"]


def test_broken_rows_are_skipped_and_change_nothing_else(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    data = replace(config.data, on_error=OnError.skip)
    write_rows(Path(config.data.path), BROKEN)
    result = run(replace(config, data=data))
    assert result.summary is not None
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


def test_many_broken_rows_are_counted(config: RunConfig) -> None:
    write_rows(Path(config.data.path), [{"prompt": "one"}] + [{"prompt": 3}] * 30)
    with pytest.raises(
        InvalidInputError, match=r"30 of 31 (.*\n)*  line 11 .*\n  and 20 more\nmend"
    ):
        run(config)
    skipping = replace(config, data=replace(config.data, on_error=OnError.skip))
    for rows in ([{"prompt": 3}], []):
        write_rows(Path(config.data.path), rows)
        with pytest.raises(InvalidInputError, match="holds no prompt that could be used"):
            run(skipping)


def test_a_budget_too_small_for_a_prompt_names_its_line(config: RunConfig) -> None:
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


def test_wrong_sampling_is_not_blamed_on_the_prompts(config: RunConfig) -> None:
    sampling = replace(PARAMS, stop_token_ids=[97])
    with pytest.raises(InvalidInputError, match=r"^sampling.stop_token_ids=97"):
        run(replace(config, sampling=sampling))


def test_columns_that_would_be_there_twice(config: RunConfig) -> None:
    write_rows(Path(config.data.path), [{"prompt": "one", "seed": 3, "text": "x", "id": 1}])
    with pytest.raises(InvalidInputError, match=r"line 1 has columns .*: seed, text; rename"):
        run(config)
    run(replace(config, data=replace(config.data, columns=["id"])))
    assert output_rows(config)[0]["id"] == 1


def test_parquet_in_and_out_keeps_types_and_order(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    table = pa.table(
        {
            "messages": [CHAT, [{"role": "system", "content": "six"}, *CHAT]],
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "code": pa.array([b"\x00", None], pa.binary()),
            "small": pa.array([1, 2], pa.int8()),
            "nested": [{"a": [1]}, {"a": []}],
        }
    )
    pq.write_table(table, path)
    config = replace(config, data=DataConfig(path=str(path)))
    parquet = with_output(config, path=str(tmp_path / "out.parquet"))
    run(parquet)
    run(config)
    out = pq.read_table(tmp_path / "out.parquet")
    for name in ("when", "code", "small", "nested"):
        assert out.schema.field(name).type == table.schema.field(name).type
        assert out.column(name).to_pylist() == [v for v in table.column(name).to_pylist()
                                                for _ in range(3)]  # fmt: skip
    assert out.column("prompt").to_pylist()[0] == CHAT
    assert out.column("sample_index").to_pylist() == [0, 1, 2] * 2
    as_json = output_rows(config)
    assert as_json[0]["when"] == "1970-01-01T00:00:00Z"
    assert (as_json[0]["code"], as_json[3]["code"]) == ("AA==", None)
    for name in ("text", "token_ids", "logprobs", "seed", "weight_versions", "finish_reason"):
        assert out.column(name).to_pylist() == [row[name] for row in as_json]
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.parquet", "out.parquet.run.json"]


def test_columns_that_make_no_parquet_are_named_before_any_work(
    config: RunConfig, tmp_path: Path
) -> None:
    config = with_output(config, path=str(tmp_path / "out.parquet"))
    with pytest.raises(
        InvalidInputError,
        match=r"column 'prompt' is text in line 1 and a list of "
        r"objects in line 2, and a Parquet column has one type: write \.jsonl$",
    ):
        run(config)
    for wrong, reason in (
        ([None, 1, "x"], "is a number in line 2 and text in line 3, and a Parquet column"),
        ([["x"], [], [1]], "is a list of texts in line 1 and a list of numbers in line 3"),
        ([{}, {}], "do not make a Parquet column"),
        ([2**70, 1], "do not make a Parquet column"),
    ):
        rows = [{"prompt": "one", "x": value} for value in wrong]
        write_rows(Path(config.data.path), rows)
        with pytest.raises(InvalidInputError, match=f"column 'x' {reason}.*data.columns"):
            run(config)
    rows = [
        {"prompt": "one", "x": 1, "y": None, "w": [None, "a"]},
        {"prompt": "one", "x": 2.5, "z": {"a": 1}, "w": ["b"]},
    ]
    write_rows(Path(config.data.path), rows)
    run(config)
    out = output_rows(config)
    assert [row["x"] for row in out[::3]] == [1.0, 2.5]
    assert [row["w"] for row in out[::3]] == [[None, "a"], ["b"]]
    assert [row["z"] for row in out[::3]] == [None, {"a": 1}]


def test_long_files_are_submitted_piece_by_piece(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(Path(config.data.path), [{"prompt": "one"}] * 40)
    config = replace(config, scheduler=SchedulerConfig(max_running=2, max_step_tokens=16))
    most = 0
    real_step = RolloutEngine.step

    def watching_step(engine: RolloutEngine) -> list[Rollout]:
        nonlocal most
        most = max(most, len(engine.scheduler.running) + len(engine.scheduler.waiting))
        return real_step(engine)

    monkeypatch.setattr(RolloutEngine, "step", watching_step)
    run(config)
    assert most == 8
    assert len(output_rows(config)) == 120
