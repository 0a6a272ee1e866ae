"""The dataset job on a tiny engine: what it writes, resumes, skips and refuses."""

from __future__ import annotations

import io
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rollout import RolloutEngine, SamplingParams
from rollout.config import DType, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.engine.tokenizer import PromptEncoder
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError, MetricsError, OutOfMemoryError
from rollout.offline import (
    DataConfig,
    JobStatus,
    LogConfig,
    OnError,
    OutputError,
    RunConfig,
    run_job,
)
from rollout.offline.output import output_lock
from rollout.offline.run_log import JsonlLog
from rollout.types import FinishReason, Rollout
from tests.helpers.small_jobs import output_rows, run, small_job, with_output, write_rows
from tests.helpers.text_model import save_text_model
from tests.helpers.tiny_moe import save_tiny_moe

CHAT = [{"role": "user", "content": "one two"}]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "three four five", "answer": 12},
    {"prompt": CHAT, "answer": 3},
    {"prompt": [5, 6, 7], "answer": None},
    {"prompt": "nine", "answer": 9},
]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=12, n=3, seed=5)


@pytest.fixture
def config(text_model_path: Path, tmp_path: Path) -> RunConfig:
    return small_job(text_model_path, tmp_path, PROMPTS, PARAMS)


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


def test_a_complete_output_is_left_alone(config: RunConfig) -> None:
    run(config)
    path = Path(config.output.path or "")
    before = path.read_bytes(), path.stat().st_mtime_ns
    result = run(replace(config, model=replace(config.model)), spec="ngram")
    assert result.status is JobStatus.NOTHING_TO_DO
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_whatever_is_cut_off_is_made_again(config: RunConfig, suffix: str) -> None:
    same_type = [row for row in PROMPTS if isinstance(row["prompt"], str)]
    write_rows(Path(config.data.path), same_type)
    path = Path(config.output.path or "").with_suffix(suffix)
    config = with_output(config, path=str(path))
    run(config)
    expected = output_rows(config)
    record = path.with_name(path.name + ".run.json")
    unfinished = record.read_text().replace('"complete": {', '"complete": null, "was": {')
    journal = path
    if suffix == ".parquet":
        journal = path.with_name(path.name + ".partial.jsonl")
        lines = [
            {name: value for name, value in row.items() if name not in ("prompt", "answer")}
            for row in expected
        ]
        write_rows(journal, lines)
    content = journal.read_bytes()
    for cut in (0, len(content) // 3, len(content) - 1, len(content)):
        record.write_text(unfinished)
        journal.write_bytes(content[:cut])
        result = run(config)
        assert result.status is JobStatus.COMPLETED
        assert result.summary is not None
        assert result.summary.resumed == content[:cut].count(b"\n")
        assert result.summary.rollouts + result.summary.resumed == len(expected)
        assert output_rows(config) == expected
        if suffix == ".parquet":
            assert not journal.exists()


def test_rows_torn_off_a_complete_output_are_made_again(config: RunConfig) -> None:
    run(config)
    expected = output_rows(config)
    path = Path(config.output.path or "")
    path.write_bytes(path.read_bytes()[:-30])
    assert run(config).status is JobStatus.COMPLETED
    assert output_rows(config) == expected


def test_rows_of_no_such_prompt_and_rows_twice_are_refused(config: RunConfig) -> None:
    run(config)
    path = Path(config.output.path or "")
    lines = path.read_text().splitlines(keepends=True)
    for wrong, reason in (
        (lines[0], "is there twice"),
        (lines[0].replace('"sample_index": ', '"sample_index": 9'), "is no rollout of this run"),
    ):
        path.write_text("".join([*lines, wrong]))
        with pytest.raises(OutputError, match=f"{reason}: take that line out"):
            run(config)
    expected = output_rows(with_output(config, path=write_rows(path.with_name("x.jsonl"), [])))
    assert expected == []
    run(with_output(config, overwrite=True))
    assert len(output_rows(config)) == 12


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"sampling": replace(PARAMS, temperature=0.5)}, "sampling.temperature was 0.9 and is 0.5"),
        ({"sampling": replace(PARAMS, seed=6)}, "sampling.seed was 5 and is 6"),
        ({"exact": False}, "exact was True and is False"),
    ],
)
def test_the_output_of_another_run_is_refused(
    config: RunConfig, changes: dict[str, Any], difference: str
) -> None:
    run(config)
    other = replace(config, **changes)
    with pytest.raises(OutputError, match=rf"another run: {difference}(; .*)?\. choose another"):
        run(other)
    assert run(with_output(other, overwrite=True)).status is JobStatus.COMPLETED


def test_inexact_runs_are_told_apart_by_the_batches_they_have_not_by_how_that_was_said(
    config: RunConfig,
) -> None:
    config = replace(config, exact=False, scheduler=SchedulerConfig())
    run(config)
    said = SchedulerConfig(max_running=32, max_step_tokens=512, chunk_len=256)
    assert run(replace(config, scheduler=said)).status is JobStatus.NOTHING_TO_DO
    with pytest.raises(OutputError, match=r"scheduler was .*'max_running': 32"):
        run(replace(config, scheduler=SchedulerConfig(max_running=31)))


def test_changed_prompts_or_weights_are_noticed(config: RunConfig, tmp_path: Path) -> None:
    run(config)
    write_rows(Path(config.data.path), [*PROMPTS, {"prompt": "one"}])
    with pytest.raises(OutputError, match=r"data \(the prompts themselves\) differs"):
        run(config)
    write_rows(Path(config.data.path), PROMPTS)
    other = save_text_model(tmp_path / "other-model")
    moved = replace(config, model=replace(config.model, path=str(other)))
    assert run(moved).status is JobStatus.NOTHING_TO_DO  # the same model, elsewhere
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(OutputError, match="model weights differs"):
        run(moved)


def test_a_file_of_someone_else_is_refused(config: RunConfig) -> None:
    path = Path(config.output.path or "")
    path.write_text("precious\n")
    with pytest.raises(OutputError, match=r"no rollouts.jsonl.run.json says that a job wrote it"):
        run(config)
    assert path.read_text() == "precious\n"
    run(with_output(config, overwrite=True))
    assert len(output_rows(config)) == 12


def test_the_prompts_are_never_the_output(config: RunConfig) -> None:
    config = with_output(config, path=config.data.path, overwrite=True)
    with pytest.raises(InvalidInputError, match=r"is data\.path"):
        run(config)
    assert Path(config.data.path).exists()


def test_one_job_per_output(config: RunConfig) -> None:
    with (
        output_lock(Path(config.output.path or "")),
        pytest.raises(OutputError, match="is being written by another job"),
    ):
        run(config)


def test_an_unfinished_output_of_this_run_survives_overwrite(config: RunConfig) -> None:
    config = with_output(config, overwrite=True)
    run(config)
    path = Path(config.output.path or "")
    record = path.with_name(path.name + ".run.json")
    record.write_text(record.read_text().replace('"complete": {', '"complete": null, "was": {'))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    result = run(config)
    assert result.summary is not None
    assert (result.summary.resumed, result.summary.rollouts) == (5, 7)
    again = run(config)  # complete now: made anew
    assert again.summary is not None
    assert (again.summary.resumed, again.summary.rollouts) == (0, 12)


BROKEN = [
    {"prompt": "three four five", "answer": 12},
    {"prompt": [5, 97], "answer": 1},  # the vocabulary has 97 tokens
    {"prompt": [{"role": "user", "content": "one two"}], "answer": 3},
    {"prompt": "one " * 200, "answer": 2},  # the context has 128
    {"prompt": "", "answer": 0},
    {"prompt": "nine", "answer": 9},
]


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


# Parquet


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


# Stopping


def test_a_signal_stops_between_steps_and_the_job_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, sampling=replace(PARAMS, n=8))
    whole = with_output(config, path=str(tmp_path / "whole.jsonl"))
    run(whole)
    stops = 0
    path = Path(config.output.path or "")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        with monkeypatch.context() as patch:
            patch.setattr(RolloutEngine, "step", signalled_step(path, number))
            result = run(config)
        if result.status is JobStatus.STOPPED:
            stops += 1
            assert result.signal is number
        assert [signal.getsignal(number) for number in numbers] == handlers
    assert stops == len(numbers)
    assert run(config).status is JobStatus.COMPLETED
    assert output_rows(config) == output_rows(whole)


def test_a_stopped_job_names_the_file_that_is_there(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(Path(config.data.path), [row for row in PROMPTS if isinstance(row["prompt"], str)])
    config = with_output(config, path=str(tmp_path / "out.parquet"))
    partial = tmp_path / "out.parquet.partial.jsonl"
    monkeypatch.setattr(RolloutEngine, "step", signalled_step(partial, signal.SIGINT))
    result = run(config)
    assert result.status is JobStatus.STOPPED
    assert result.summary is not None
    assert result.summary.output == partial
    assert len(partial.read_text().splitlines()) == result.summary.rollouts > 0
    assert str(partial) in dict(result.summary.lines())["rollouts"]


def test_rollouts_without_text_are_in_the_summary(config: RunConfig) -> None:
    sampling = replace(PARAMS, stop_token_ids=[2], logit_bias={2: 100.0})
    result = run(replace(config, sampling=sampling))
    assert result.summary is not None
    shown = dict(result.summary.lines())["without text"]
    assert shown.startswith("12: the model stopped at once; data.chat_template=auto puts")


def test_a_second_signal_insists(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = with_output(config, path=str(tmp_path / "whole.jsonl"))
    run(whole)
    path = Path(config.output.path or "")
    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", signalled_step(path, signal.SIGINT, times=2))
        with pytest.raises(KeyboardInterrupt):
            run(config)
    done = len(output_rows(config))
    result = run(config)
    assert result.summary is not None
    assert result.summary.resumed == done > 0
    assert output_rows(config) == output_rows(whole)


def test_a_signal_that_is_ignored_stays_so(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nohup ignores SIGHUP, and so does the job it runs."""
    path = Path(config.output.path or "")
    monkeypatch.setattr(RolloutEngine, "step", signalled_step(path, signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(config).status is JobStatus.COMPLETED
    finally:
        signal.signal(signal.SIGHUP, before)


def signalled_step(path: Path, number: signal.Signals, times: int = 1):
    """A step in which the signal comes so many times, when the output has grown."""
    real_step, sent = RolloutEngine.step, []
    before = path.stat().st_size if path.exists() else 0

    def step(engine: RolloutEngine) -> list[Rollout]:
        if not sent and path.exists() and path.stat().st_size > before:
            sent.append(number)
            for _ in range(times):
                signal.raise_signal(number)
        return real_step(engine)

    return step


def test_an_engine_that_fails_loses_nothing_finished(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step = RolloutEngine.step
    finished: list[Rollout] = []

    def failing_step(engine: RolloutEngine) -> list[Rollout]:
        if len(finished) >= 4:
            raise OutOfMemoryError("the device is lost")
        rollouts = real_step(engine)
        finished.extend(r for r in rollouts if r.finish_reason is not FinishReason.ABORT)
        return rollouts

    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", failing_step)
        with pytest.raises(OutOfMemoryError):
            run(config)
    assert len(output_rows(config)) == len(finished) >= 4
    result = run(config)
    assert result.summary is not None
    assert result.summary.resumed == len(finished)
    assert len(output_rows(config)) == 12


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


# What is shown


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


def test_a_log_that_fails_loses_no_rollout(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, log=LogConfig(jsonl=str(tmp_path / "run.jsonl")))
    ended: list[Rollout] = []
    real_step, real_write = RolloutEngine.step, JsonlLog.write

    def counting_step(engine: RolloutEngine) -> list[Rollout]:
        rollouts = real_step(engine)
        ended.extend(rollouts)
        return rollouts

    def failing_write(log: JsonlLog, kind: str, values: dict[str, Any]) -> None:
        if kind == "rollout":
            raise MetricsError("the disk is full")
        real_write(log, kind, values)

    monkeypatch.setattr(RolloutEngine, "step", counting_step)
    with monkeypatch.context() as patch:
        patch.setattr(JsonlLog, "write", failing_write)
        with pytest.raises(MetricsError):
            run(config)
    assert ended
    assert len(output_rows(config)) == len(ended)
    run(config)
    assert len(output_rows(config)) == 12


def test_progress_lines_where_there_is_no_terminal(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run(replace(config, log=LogConfig(seconds=1e-6)))
    assert "/12  " in caplog.text
    assert "accept length 1.00  ETA after the first rollouts" in caplog.text
    assert "accept length 1.00  ETA 0:0" in caplog.text
