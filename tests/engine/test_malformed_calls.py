"""Every public call works, or raises an error of ours that names the field, for any arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.config import (
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    engine_config,
)
from rollout.errors import InvalidInputError, RolloutError

PARAMS = SamplingParams(max_new_tokens=2, seed=3, ignore_eos=True)
TURNS = 8  # values tried for each argument

Call = tuple[Callable[..., object], dict[str, object]]


def in_itself() -> list[Any]:
    itself: list[Any] = []
    itself.append(itself)
    return itself


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


WRONG: list[Any] = [
    None, True, 5, -1, 0, 10**400, 2**64, 2.5, float("nan"), float("inf"), object(), len, int,
    "", "text", "\ud800", "a\0b", b"", b"ab", bytearray(b"ab"), memoryview(b"ab"), [b"\x05"],
    [], [None], [[]], [[None]], [[5.5]], [[True]], [5, None], [5, True], [[5, "a"]], [[5, [6]]],
    [10**400], [[10**400]], [-1], {}, {"a": 1}, {1: 2}, {5}, range(3, 6), in_itself(), deep(),
    np.int64(5), np.array([5, 6]), np.array([5.0]), np.array([[5, 6]]), np.array([True]),
    np.array(["a"]), np.array([5], dtype=object), np.float32(2), np.bool_(True),
    torch.tensor(5), torch.tensor([5, 6]), torch.tensor([5.0]), torch.tensor([[5, 6]]),
    PARAMS, [PARAMS, None], [{}], [[{}]], [{"role": "user"}], [[{"role": 1, "content": 2}]],
]  # fmt: skip


def public_calls(engine: RolloutEngine, folder: Path) -> dict[str, Call]:
    """Each with arguments that are good, or wrong in a way of their own."""

    def stream(**kwargs: Any) -> object:
        return list(engine.stream(**kwargs))

    def corpus(**kwargs: Any) -> None:
        engine.remove_external_corpus(engine.add_external_corpus(**kwargs))

    whole = {"prompts": [[5, 6]], "params": PARAMS}
    scored = {"prompt_ids": [5], "output_ids": [6], "params": PARAMS}
    sent = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
    group = {"master_address": "127.0.0.1", "master_port": 0, "rank_offset": 0, "world_size": 2}
    group |= {"group_name": "g", "backend": "gloo", "timeout": 0.01, "sender": "specrollout"}
    update = {"selector": "all", "flush_cache": True, "weight_version": None, "timeout": 3.0}
    return {
        "generate": (engine.generate, whole),
        "stream": (stream, whole),
        "check": (engine.check, {"prompt": [5, 6], "params": PARAMS}),
        "submit": (
            engine.submit,
            {"prompt": [5, 6], "params": PARAMS, "prompt_index": 0, "sample_index": 0}
            | {"request_seed": 3, "partial_ids": [5]},
        ),
        "watch": (engine.watch, {"request_id": 0}),
        "abort": (engine.abort, {"request_id": 0}),
        "score": (engine.score, scored),
        "score_with_extras": (engine.score_with_extras, scored),
        "pause": (engine.pause_generation, {"mode": "abort"}),
        "release": (engine.release_memory, {"tags": ["kv_cache"], "keep_weights": True}),
        "resume": (engine.resume_memory, {"tags": ["kv_cache"]}),
        "begin": (engine.begin_weight_update, {"manifest": None, **update}),
        "abandon": (engine.abandon_weight_update, {"reason": "why"}),
        "tensor": (
            engine.update_weights_from_tensor,
            {"named_tensors": [], "load_format": None, "partial": True},
        ),
        "bucket": (engine.update_weights_from_bucket, {"bucket": None, "direct": False}),
        "disk": (engine.update_weights_from_disk, {"model_path": folder / "none"}),
        "ipc": (engine.update_weights_from_ipc, {"handles": []}),
        "init_group": (engine.init_weights_update_group, group),
        "destroy_group": (engine.destroy_weights_update_group, {"group_name": "g"}),
        "distributed": (engine.update_weights_from_distributed, sent | {"load_format": None}),
        "decline": (engine.decline_weights_from_distributed, sent | {"reason": "why"}),
        "manifest": (engine.weights_manifest, {"selector": "all", "model_path": None}),
        "read": (engine.read_weights, {"names": ["lm_head.weight"]}),
        "digest": (engine.weights_digest, {"selector": "all"}),
        "by_name": (engine.get_weights_by_name, {"name": "lm_head.weight", "truncate_size": 3}),
        "chunks": (corpus, {"name": "c", "token_chunks": [[5, 6]], "wait": True}),
        "documents": (corpus, {"documents": ["text"], "publish": "when_ready", "wait": True}),
        "file": (corpus, {"file_path": folder / "none", "wait": True}),
        "remove": (engine.remove_external_corpus, {"name": "none"}),
        "publish": (engine.publish_external_corpus, {"name": "none"}),
        "wait": (engine.wait_for_external_corpora, {"timeout": 1.0}),
        "share": (engine.share_corpus, {"max_bytes": -1}),
        "learn": (engine.learn_corpus_deltas, {"deltas": []}),
        "save": (engine.save_corpus, {"path": folder / "corpus"}),
        "load": (engine.load_corpus, {"path": folder / "corpus"}),
    }


@pytest.fixture(scope="module")
def engine(text_model_path):
    return RolloutEngine.from_pretrained(
        text_model_path,
        spec_options={"corpus_bytes": 1 << 20, "calibration_seconds": 0.0},
        max_running=4,
        num_threads=1,
    )


def refusal(call: Callable[..., object], **arguments: object) -> Any:
    """The error it raised, of ours or of a file; no other may come out."""
    try:
        call(**arguments)
    except (RolloutError, OSError) as error:
        return error
    return None


def undo_begun(engine: RolloutEngine) -> None:
    """Undo whatever a call that was taken has begun."""
    engine.abandon_weight_update()
    if engine.released_tags:
        engine.resume_memory()
    engine.pause_generation()
    engine.continue_generation()
    engine.take_ended()


def test_nothing_but_our_errors_comes_of_wrong_values(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some are paths
    tokens = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9, seed=1))[0].token_ids
    engine.save_corpus("corpus")
    rng = random.Random(7)
    refused = 0
    for name, (call, good) in public_calls(engine, tmp_path).items():
        for argument in good:
            for value in rng.sample(WRONG, TURNS):
                error = refusal(call, **good | {argument: value})
                refused += error is not None
                assert not isinstance(error, OSError) or argument == "path", (name, argument)
                undo_begun(engine)
        engine.check_integrity()
        assert engine.worker.memory.usage.used == 0
    assert refused > 300
    again = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9, seed=1))[0].token_ids
    assert again == tokens


PARTS = {"model": ModelConfig, "memory": MemoryConfig, "scheduler": SchedulerConfig}


def test_wrong_settings_are_refused_before_a_model_is_read(tiny_model_path):
    own = [f.name for part in PARTS.values() for f in fields(part) if f.name != "path"]
    own += [f.name for f in fields(EngineConfig) if f.name not in PARTS]
    for name in own:
        for value in WRONG:
            overrides = {name: value}
            error = refusal(engine_config, path=str(tiny_model_path), overrides=overrides)
            assert error is None or name in error.field
    for name in [f.name for f in fields(ParallelConfig)]:
        for value in WRONG:
            error = refusal(ParallelConfig, **{name: value})
            assert error is None or error.field.startswith("parallel.")


def test_wrong_sampling_parameters_name_their_field():
    for name in [f.name for f in fields(SamplingParams)]:
        for value in WRONG:
            error = refusal(SamplingParams, **{name: value})
            assert error is None or error.field.startswith("sampling.")


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (None, PARAMS, "prompts"),
        (5, PARAMS, "prompts"),
        (object(), PARAMS, "prompts"),
        (b"ab", PARAMS, "prompts"),
        ({"a": 1}, PARAMS, "prompts"),
        (torch.tensor([5, 6]), PARAMS, "prompts"),
        ([None], PARAMS, "prompts[0]"),
        ([[5], b"\x05"], PARAMS, "prompts[1]"),
        ([[5, True]], PARAMS, "prompts[0]"),
        ([np.array([True])], PARAMS, "prompts[0]"),
        ([np.array([5.0])], PARAMS, "prompts[0]"),
        ([np.array([[5, 6]])], PARAMS, "prompts[0]"),
        ([{5, 6}], PARAMS, "prompts[0]"),
        ([[5]], None, "params"),
        ([[5]], [None], "params[0]"),
        ([[5]], [PARAMS, PARAMS], "params"),
        ([[5]], SamplingParams(n=10**400), "params.n"),
    ],
)
def test_what_is_no_prompt_or_no_parameters_is_named(engine, prompts, params, field):
    with pytest.raises(InvalidInputError) as caught:
        engine.generate(prompts, params)
    assert caught.value.field == field


def test_arrays_and_tensors_of_token_ids_are_prompts(engine):
    (plain,) = engine.generate([[5, 6, 7]], PARAMS)
    for prompt in (
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7], dtype=np.int32),
        [np.int64(5), np.int64(6), np.int64(7)],
        torch.tensor([5, 6, 7]),
    ):
        (rollout,) = engine.generate([prompt], PARAMS)
        assert rollout.prompt_ids == [5, 6, 7]
        assert all(type(token) is int for token in rollout.prompt_ids)
        assert rollout.token_ids == plain.token_ids
    both = engine.generate(np.array([[5, 6, 7], [8, 9, 10]]), PARAMS)
    assert [rollout.prompt_ids for rollout in both] == [[5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"path": None}, "path"),
        ({"path": 5}, "path"),
        ({"spec": None}, "spec"),
        ({"spec_options": 5}, "spec_options"),
        ({"spec_options": {5: 1}}, "spec_options"),
        ({"spec_options": {"corpus_path": 5}}, "spec.corpus_path"),
        ({"spec_options": {"corpus_bytes": [5]}}, "spec.corpus_bytes"),
        ({"spec_options": {"budget": np.array([5, 6])}}, "spec.budget"),
        ({"parallel": 5}, "parallel"),
        ({"device": 5}, "model.device"),
        ({"tokenizer": "nowhere"}, "model.tokenizer"),
        ({"num_threads": 0}, "num_threads"),
        ({"max_running": True}, "scheduler.max_running"),
        ({"exact": "no"}, "exact"),
    ],
)
def test_what_no_engine_can_be_made_of_is_named(tiny_model_path, arguments, field):
    with pytest.raises(InvalidInputError) as caught:
        RolloutEngine.from_pretrained(**{"path": tiny_model_path} | arguments)
    assert caught.value.field == field
