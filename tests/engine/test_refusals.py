"""The engine refuses bad input by the name of the field, before anything is started."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.config import MemoryConfig, ModelConfig, SchedulerConfig
from rollout.errors import InvalidInputError

PARAMS = SamplingParams(max_new_tokens=2, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    return RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=4)


SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, float("nan"), 1e300, 10**400, None),  # float32 has no 1e300
    "top_p": (0.0, 1.1, 1e-300, "x"),
    "top_k": (-2, True, 2**31),
    "min_p": (-0.1, 1.0),
    "n": (0, 2.5),
    "max_new_tokens": (0,),
    "min_new_tokens": (-1, 300),
    "seed": (2**64, -(2**63) - 1),
    "top_logprobs": (101, -1),
    "repetition_penalty": (0.0,),
    "presence_penalty": (float("inf"),),
    "frequency_penalty": ("x",),
    "ignore_eos": (1,),
    "entropy": (None,),
    "stop": ([""], "END", [3]),
    "stop_token_ids": (3, ["x"]),
    "logit_bias": ({1: float("inf")}, {0.5: 1.0}, [1]),
    "sampling_mask": (True, 1),  # without a cut
    "allowed_token_ids": ([2.0],),
    "bad_words": ("word", [""]),
}


def test_sampling_parameters():
    for field, values in SAMPLING.items():
        for value in values:
            with pytest.raises(InvalidInputError) as refused:
                SamplingParams(**{field: value})
            assert refused.value.field == f"sampling.{field}", (field, value)
    for name in ("max_tokens", "max_new_token"):
        with pytest.raises(InvalidInputError, match=f"sampling.{name}=.*mean max_new_tokens"):
            SamplingParams(**{name: 3})


def test_every_sampling_parameter_is_documented():
    names = [each.name for each in fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names
    assert all(f"\n        {name}: " in SamplingParams.__doc__ for name in names)


EXTREME: list[dict[str, Any]] = [
    {"top_k": 2**31 - 1},
    {"top_p": 1.2e-38},
    {"min_p": 1e-300},
    {"temperature": 1e-300},
    {"temperature": 3e38},
    {"repetition_penalty": 2**100},
    {"repetition_penalty": 1e-300},
    {"frequency_penalty": 3e38, "presence_penalty": -3e38},
    {"logit_bias": {5: 2**100, 6: -3e38}},
    {"max_new_tokens": 10**400},
    {"top_logprobs": 100, "entropy": True, "raw_logprobs": True},
]


def test_extreme_parameters_harm_nobody_else(engine):
    plain = SamplingParams(temperature=0.8, max_new_tokens=8, seed=2, ignore_eos=True)
    (expected,) = engine.generate([[5, 6, 7]], plain)
    for odd in EXTREME:
        request = engine.submit([5, 6, 7], plain)
        extreme = engine.submit([8, 9], SamplingParams(**{"max_new_tokens": 6} | odd))
        ended = {}
        while request.request_id not in ended:
            ended |= {rollout.request_id: rollout for rollout in engine.step()}
        engine.abort(extreme.request_id)
        assert ended[request.request_id].token_ids == expected.token_ids, odd
        engine.step()


PROMPTS: dict[str, tuple[Any, ...]] = {
    "prompts": (None, 5, b"ab", {"a": 1}, [1, 2, 3], torch.tensor([5, 6])),
    "prompts[0]": (
        [[1, 97]], [[-1]],  # the vocabulary has 97 tokens
        ["text"],  # there is no tokenizer
        [None], [[5, True]], [[5, 2.5]], [{5, 6}],
        [np.array([True])], [np.array([5.0])], [np.array([[5, 6]])],
    ),
    "prompts[1]": ([[1, 2], []], [[5], b"\x05"]),
    "len(prompts[0])": ([[1] * 512],),  # the context has 512
}  # fmt: skip
PARAMETERS: tuple[tuple[str, Any], ...] = (
    ("params", None),
    ("params", [PARAMS, PARAMS]),
    ("params[0]", [None]),
    ("params.n", SamplingParams(n=10**400)),
    ("sampling.stop", SamplingParams(stop=["x"])),
    ("sampling.stop_regex", SamplingParams(stop_regex=["x"])),
    ("sampling.stop_token_ids", SamplingParams(stop_token_ids=[-1])),
    ("sampling.logit_bias", SamplingParams(logit_bias={-1: 1.0})),
    ("sampling.allowed_token_ids", SamplingParams(allowed_token_ids=[97])),
    ("sampling.logprob_token_ids", SamplingParams(logprob_token_ids=[-1])),
    ("sampling.routed_experts", SamplingParams(routed_experts=True)),
)


def test_prompts_and_their_parameters(engine):
    calls = [(field, prompts, PARAMS) for field, given in PROMPTS.items() for prompts in given]
    calls += [(field, [[5]], params) for field, params in PARAMETERS]
    for field, prompts, params in calls:
        with pytest.raises(InvalidInputError) as refused:
            engine.generate(prompts, params)
        assert refused.value.field == field, (prompts, params)
    with pytest.raises(InvalidInputError, match="the value of prompt_token_ids"):
        engine.generate([{"prompt_token_ids": [5, 6]}], PARAMS)
    assert not engine.has_unfinished


def test_submit_and_score(engine):
    for options in (
        {"request_seed": -(2**63) - 1},
        {"request_seed": 2**64},
        {"prompt_index": -2},
        {"sample_index": "x"},
        {"partial_ids": [5, 6]},  # as many as may be new
        {"partial_ids": [97]},
    ):
        with pytest.raises(InvalidInputError, match=next(iter(options))):
            engine.submit([5, 6], PARAMS, **options)
    with pytest.raises(InvalidInputError, match="params=None: must be a SamplingParams"):
        engine.submit([5, 6], None)
    assert not engine.has_unfinished
    with pytest.raises(InvalidInputError, match="mode='soon': must be one of abort"):
        engine.pause_generation("soon")
    with pytest.raises(InvalidInputError, match="tags='x': must be one of weights"):
        engine.release_memory(["x"])
    with pytest.raises(InvalidInputError, match="output_ids=257"):
        engine.score([5] * 256, [6] * 257)
    assert len(engine.score([5] * 256, [6] * 256)) == 256


def test_tensors_of_an_update(engine):
    for tensors in (
        None, "weights", [1, 2], [("name",)], [(1, torch.zeros(1))], [("lm_head.weight", None)],
        iter([5]), iter([("lm_head.weight",)]),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="named_tensors"):
            engine.update_weights_from_tensor(tensors)
    with pytest.raises(InvalidInputError, match="load_format"):
        engine.update_weights_from_tensor([], load_format=np.array([5, 6]))
    assert engine.can_run


def test_a_prompt_may_be_any_sequence_of_integers(engine):
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


ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"path": None}, "path"),
    ({"spec": None}, "spec"),
    ({"spec": "nonsense"}, "spec"),
    ({"spec_options": 5}, "spec_options"),
    ({"spec_options": {5: 1}}, "spec_options"),
    ({"spec_options": {"draft": 4}}, "spec.draft"),
    ({"spec_options": {"corpus_path": 5}}, "spec.corpus_path"),
    ({"spec_options": {"corpus_bytes": [5]}}, "spec.corpus_bytes"),
    ({"spec_options": {"corpus_bytes": 1}}, "spec.corpus_bytes"),
    ({"spec_options": {"corpus_bytes": 1 << 62}}, "spec.corpus_bytes"),
    ({"spec_options": {"corpus_path": __file__}}, "spec.corpus_path"),
    ({"spec_options": {"external_corpora": ["a"]}}, "spec.external_corpora"),
    ({"spec_options": {"external_corpora": {"a": 3}}}, "spec.external_corpora.a"),
    ({"spec_options": {"external_corpora": {"": __file__}}}, "spec.external_corpora"),
    ({"spec_options": {"max_external_bytes": 0}}, "spec.max_external_bytes"),
    ({"spec_options": {"max_external_tokens": 1.5}}, "spec.max_external_tokens"),
    ({"spec_options": {"budget": np.array([5, 6])}}, "spec.budget"),
    ({"parallel": 5}, "parallel"),
    ({"device": 5}, "model.device"),
    ({"dtype": "int3"}, "model.dtype"),
    ({"tokenizer": "nowhere"}, "model.tokenizer"),
    ({"num_threads": 0}, "num_threads"),
    ({"max_running": True}, "scheduler.max_running"),
    ({"max_runing": 4}, "max_runing"),
    ({"exact": "no"}, "exact"),
    ({"load_format": "x"}, "model.load_format"),
    ({"record_routes": 1}, "model.record_routes"),
    ({"prefix_cache": 1}, "memory.prefix_cache"),
    ({"parallel": {"size": 2}}, "parallel.size"),
]


def test_options_of_an_engine(tiny_model_path):
    for arguments, field in ENGINES:
        with pytest.raises(InvalidInputError) as refused:
            RolloutEngine.from_pretrained(**{"path": tiny_model_path} | arguments)
        assert refused.value.field == field, arguments
    with pytest.raises(InvalidInputError, match="did you mean max_context_len"):
        RolloutEngine.from_pretrained(tiny_model_path, max_model_len=4)


def test_an_engines_options_are_the_configurations_own():
    function = RolloutEngine.from_pretrained
    options = {
        name: each.default
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is each.KEYWORD_ONLY and name != "spec_options"
    }
    parts = (ModelConfig, MemoryConfig, SchedulerConfig)
    configured = {each.name: each.default for part in parts for each in fields(part)}
    del configured["path"]
    assert options == configured | {"exact": True, "num_threads": None, "parallel": None}
    for name in options:
        assert f"\n            {name}: " in function.__doc__


def test_an_error_keeps_its_parts_in_a_pickle():
    error = pickle.loads(pickle.dumps(InvalidInputError("max_running", 0, "must be >= 1")))
    assert (error.field, error.value, error.remedy) == ("max_running", 0, "must be >= 1")
    assert str(error) == "max_running=0: must be >= 1"


def test_an_errors_message_is_short_whatever_the_value():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (10**5000, deep, {"a": 10**5000}, "x" * 10**6, [7] * 10**6):
        assert len(str(InvalidInputError("n", value, "is too much"))) < 150
