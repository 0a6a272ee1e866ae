"""OpenRLHF's command line and ours: what is split off, what is refused."""

from __future__ import annotations

import pytest

from rollout.errors import InvalidInputError
from rollout.trainers.openrlhf.arguments import read_arguments
from rollout.trainers.openrlhf.options import OwnOptions, split_arguments
from rollout.trainers.openrlhf.sampling import VllmSamplingParams, engine_params

FINE = "--vllm.num_engines 2 --ds.attn_implementation sdpa --vllm.sync_backend gloo"


def test_ours_are_split_off_and_sorted():
    line = (
        "--specrollout.spec none --actor.adam.lr 1e-6 --specrollout.spec ngram"
        " --specrollout.num_draft_tokens=12 --specrollout.kv_bytes 1000000 --ds.packing_samples"
        " --specrollout.sync_timeout 5 --specrollout.keep_kv true"
    )
    options, rest = split_arguments(line.split())
    assert rest == ["--actor.adam.lr", "1e-6", "--ds.packing_samples"]
    assert options == OwnOptions(
        spec="ngram",
        spec_options={"num_draft_tokens": 12},
        overrides={"kv_bytes": 1_000_000},
        sync_timeout=5,
        keep_kv=True,
    )


def test_mistakes_in_ours_are_named():
    for arguments, named in (
        ("kv_byte 1", "spec.kv_byte"),
        ("spec nothing", "spec='nothing'"),
        ("spec none --specrollout.num_draft_tokens 3", "num_draft_tokens"),
        ("kv_bytes", "--specrollout.kv_bytes"),
        ("kv_bytes -3", "memory.kv_bytes"),
        ("sync_timeout soon", "sync_timeout"),
        ("keep_kv maybe", "keep_kv"),
        ("max_context_len 100", "--data.max_len"),
        ("path here", "--actor.model_name_or_path"),
    ):
        with pytest.raises(InvalidInputError, match=named):
            split_arguments(f"--specrollout.{arguments}".split())


def read(extra: str = "", *, has_flash_attn=False):
    return read_arguments(f"{FINE} {extra}".split(), has_flash_attn=has_flash_attn)


def test_what_the_engine_takes():
    assert read("--data.max_len 99 --unknown.to_us x").sync_backend == "gloo"
    assert read("--vllm.gpu_memory_utilization 0.5").dtype == "bfloat16"
    assert read("--ds.param_dtype fp16").dtype == "float16"
    assert read("--train.colocate_all").sync_backend == "gloo"
    assert read("--ds.packing_samples", has_flash_attn=True).dtype == "bfloat16"


def test_the_checkpoint_that_a_run_goes_on_from(tmp_path):
    resume = f"--ckpt.load_enable --ckpt.path {tmp_path}"
    assert read(resume).resumed_from == ""  # there is none: OpenRLHF begins anew
    (tmp_path / "_actor").mkdir()
    (tmp_path / "_actor" / "latest").write_text("global_step8")
    assert read(resume).resumed_from == "global_step8"
    assert read(f"--ckpt.path {tmp_path}").resumed_from == ""


def test_what_cannot_be_honoured_is_refused_by_name():
    for refused in (
        "--vllm.tensor_parallel_size 0",
        "--vllm.sync_backend mpi",
        "--vllm.gpu_memory_utilization 1.0",
        "--data.max_images_per_prompt 1",
        "--ds.lora.rank 8",
        "--ds.param_dtype fp32",
        "--ds.attn_implementation flash_attention_2",
        "--ds.packing_samples",
        "--ds.ring_attn_size 2",
    ):
        for written in (refused, refused.replace(" ", "=")):
            with pytest.raises(InvalidInputError, match=f"^{refused.split()[0]}="):
                read(written)


def test_cuda_ipc_is_refused_with_the_way_out():
    with pytest.raises(InvalidInputError, match=r"^--vllm\.sync_backend='nccl': must be gloo"):
        read("--train.colocate_all --vllm.sync_backend nccl")
    # Asynchronous training shares no GPU with the engines, whatever is colocated besides.
    assert read("--train.colocate_all --train.async_enable --vllm.sync_backend nccl")


def test_a_model_that_cannot_be_partitioned_so_is_refused(tiny_model_path):
    model = f"--actor.model_name_or_path {tiny_model_path} --vllm.tensor_parallel_size"
    assert read(f"{model} 2")
    with pytest.raises(InvalidInputError, match=r"^--vllm\.tensor_parallel_size=3: must divide"):
        read(f"{model} 3")


def test_sampling_parameters_of_vllm():
    params = VllmSamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=7, min_tokens=9, stop="x", logprobs=1
    )
    ours = engine_params(params)
    assert (ours.temperature, ours.top_p, ours.max_new_tokens) == (0.5, 0.9, 7)
    assert (ours.min_new_tokens, ours.stop) == (7, ["x"])


def test_sampling_parameters_without_an_equal_are_refused():
    for wrong in ({"n": 2}, {"logprobs": 5}, {"logprobs": -1}, {"max_tokens": None}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            engine_params(VllmSamplingParams(**wrong))
