"""The parts of verl's configuration that reach a server, and those refused; verl is not needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout.config import DType, ParallelMode
from rollout.errors import InvalidInputError
from rollout.trainers.verl.options import REFUSED, server_options
from rollout.trainers.verl.sampling import ResponseLimits, engine_params

LIMITS = ResponseLimits(prompt_length=10, response_length=20)


def rollout_config(**changes):
    off = SimpleNamespace(enable=False, enabled=False)
    fields = dict.fromkeys(REFUSED) | {
        "mtp": off,
        "prometheus": {"enable": False, "port": 9090},
        "profiler": off,
        "disaggregation": off,
        "qat": {"enable": False, "mode": "w4a16"},
        "tensor_model_parallel_size": 1,
        "over_sample_rate": 0.0,
        "repetition_penalty": 1.0,
        "quantization": None,
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy",
        "checkpoint_engine": SimpleNamespace(backend="naive"),
        "gpu_memory_utilization": 0.4,
        "standalone_gpu_memory_utilization": 0.8,
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "max_model_len": 128,
        "enable_prefix_caching": True,
        "prompt_length": 10,
        "response_length": 20,
        "seed": 42,
        "ignore_eos": False,
        "free_cache_engine": True,
        "enable_sleep_mode": True,
    }
    return SimpleNamespace(**(fields | changes))


def model_config(path, **changes):
    fields = {
        "local_path": str(path),
        "local_tokenizer_path": str(path),
        "tokenizer": SimpleNamespace(eos_token_id=2),
        "lora_rank": 0,
        "lora": {},
        "override_config": {"attn_implementation": "sdpa"},
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture
def options(tiny_model_path):
    def make(own=None, model=None, standalone=False, **changes):
        return server_options(
            rollout_config(**changes),
            model_config(tiny_model_path, **(model or {})),
            own or {},
            standalone=standalone,
        )

    return make


def test_fields_are_taken_over(options):
    taken = options({"spec": "none", "max_running": 8, "num_threads": 2, "sleep_level": 1})
    config = taken.engine_config()
    assert config.model.dtype is DType.bfloat16
    assert (config.model.max_context_len, config.memory.kv_fraction) == (128, 0.4)
    assert (config.scheduler.max_running, config.scheduler.max_step_tokens) == (8, 1024)
    assert (config.num_threads, config.parallel.size) == (2, 1)
    assert (taken.spec, taken.keeps_weights, taken.stop_token_ids) == ("none", True, (2,))
    assert taken.weights_come_first
    assert not options(load_format="auto").weights_come_first
    assert options(standalone=True).engine_config().memory.kv_fraction == 0.8
    assert options(logprobs_mode="raw_logprobs").raw_logprobs
    parallel = options(tensor_model_parallel_size=2).engine_config().parallel
    assert (parallel.mode, parallel.size) == (ParallelMode.tensor, 2)
    replays = options(enable_rollout_routing_replay=True)
    for each, is_recorded in ((replays, True), (taken, False)):
        assert each.routed_experts == each.engine_config().model.record_routes == is_recorded


def test_what_cannot_be_honoured_is_refused_by_name(options):
    for field, value in (
        ("tensor_model_parallel_size", 3),  # of 6 query heads and 2 kv heads
        ("tensor_model_parallel_size", 0),
        ("data_parallel_size", 4),
        ("quantization", "fp8"),
        ("qat", {"enable": True}),
        ("load_format", "dummy_megatron"),
        ("logprobs_mode", "raw_logits"),
        ("over_sample_rate", 0.1),
        ("repetition_penalty", 1.1),
        ("prometheus", {"enable": True}),
        ("profiler", SimpleNamespace(enable=True)),
        ("mtp", SimpleNamespace(enable=True)),
        ("disaggregation", SimpleNamespace(enabled=True)),
        ("checkpoint_engine", SimpleNamespace(backend="delta_sharded")),
    ):
        with pytest.raises(InvalidInputError, match=rf"^actor_rollout_ref\.rollout\.{field}[=.]"):
            options(**{field: value})
    for own, named in (
        ({"num_draft_token": 4}, r"engine_kwargs\.specrollout\.num_draft_token=4"),
        ({"spec": "medusa"}, "spec='medusa'"),
        ({"sleep_level": 3}, r"specrollout\.sleep_level=3"),
        ({"parallel": {"size": 2}}, r"specrollout\.parallel=.*tensor_model_parallel_size"),
    ):
        with pytest.raises(InvalidInputError, match=named):
            options(own)
    for changed, named in (
        ({"rope_theta": 1e6}, "override_config.rope_theta"),
        ({"model_config": {"head_dim": 4}}, "override_config.head_dim"),
    ):
        with pytest.raises(InvalidInputError, match=named):
            options(model={"override_config": changed})


@pytest.mark.parametrize("lora", [{"lora_rank": 8}, {"lora": {"rank": 4}}])
def test_lora_comes_as_adapters_or_merged(options, lora):
    assert options(model=lora).keeps_weights  # adapters come without them
    merged = {**lora, "lora": {**lora.get("lora", {}), "merge": True}}
    nccl = SimpleNamespace(backend="nccl", update_weights_bucket_megabytes=64)
    assert not options(model=merged, checkpoint_engine=nccl).keeps_weights
    with pytest.raises(InvalidInputError, match=r"backend='nccl'.*choose naive"):
        options(model=lora, checkpoint_engine=nccl)


def params(sent, prompt_len=8, partial_len=0, max_context_len=128, **changes):
    rest = {"limits": LIMITS, "ignore_eos": False} | changes
    return engine_params(
        sent,
        prompt_len=prompt_len,
        partial_len=partial_len,
        max_context_len=max_context_len,
        **rest,
    )


def test_sampling_parameters_are_taken_over():
    sent = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "repetition_penalty": 1.1,
        "logprobs": True,
        "min_tokens": 2,
        "stop": ["\n"],
        "n": 1,
    }
    ours, wants_logprobs = params(sent, stop_token_ids=(2,))
    assert wants_logprobs
    assert (ours.temperature, ours.top_p, ours.top_k) == (0.7, 0.9, -1)
    assert (ours.repetition_penalty, ours.min_new_tokens) == (1.1, 2)
    assert (ours.stop, ours.stop_token_ids) == (["\n"], [2])
    assert not params({"ignore_eos": True}, stop_token_ids=(2,))[0].stop_token_ids
    assert params({}, raw_logprobs=True)[0].raw_logprobs


def test_none_is_not_given_and_logprobs_are_wanted_or_not():
    for sent, expected in ((None, False), (False, False), (0, False), (True, True), (1, True)):
        assert params({"logprobs": sent})[1] is expected, sent
    names = ("temperature", "stop", "stop_token_ids", "logit_bias", "ignore_eos", "seed")
    for name in names:
        assert params({name: None}, stop_token_ids=(2,)) == params({}, stop_token_ids=(2,)), name


def test_limits():
    for sent, prompt_len, partial_len, context, expected in (
        ({}, 8, 0, 128, 20),  # response_length
        ({}, 25, 0, 128, 5),  # a later turn: what is left of both lengths
        ({}, 60, 0, 128, 1),
        ({}, 8, 0, 16, 8),  # the context
        ({"max_tokens": 12}, 8, 0, 128, 12),
        ({"max_new_tokens": 12}, 8, 5, 128, 17),  # those that came before the cut count too
        ({"max_tokens": None}, 8, 5, 128, 20),
    ):
        ours, _ = params(sent, prompt_len, partial_len, context)
        assert ours.max_new_tokens == expected, (sent, prompt_len, partial_len, context)


def test_sampling_parameters_the_engine_has_not_are_refused():
    for sent in (
        {"beam_width": 2},
        {"n": 2},
        {"logprobs": 5},
        {"include_stop_str_in_output": False},
        {"raw_logprobs": True},
    ):
        ((name, value),) = sent.items()
        with pytest.raises(InvalidInputError, match=rf"{name}={value}"):
            params(sent)
    with pytest.raises(InvalidInputError, match="prompt_ids='128 tokens'"):
        params({}, prompt_len=120, partial_len=8)
