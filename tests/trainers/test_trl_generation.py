"""Trainers with ``use_vllm=True`` inside specrollout_generation, without vLLM."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer, rloo_trainer

from rollout.errors import InvalidInputError
from rollout.trainers.trl import specrollout_generation
from rollout.trainers.trl.engine_options import model_folder
from rollout.trainers.trl.generation import SpecGeneration
from rollout.types import MemoryTag
from tests.helpers.trl_runs import (
    WordReward,
    assert_same_run,
    by_generation,
    by_rollout_func,
    config,
    conversations,
    engine_of,
    run,
    spec_options,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_trl_is_as_it_was_outside(model: Path, tmp_path: Path) -> None:
    with specrollout_generation():
        assert grpo_trainer.VLLMGeneration is not VLLMGeneration
        assert rloo_trainer.VLLMGeneration is not VLLMGeneration
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert rloo_trainer.VLLMGeneration is VLLMGeneration
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ImportError, match="vLLM is not available"):
            GRPOTrainer(
                model=str(model),
                reward_funcs=WordReward(),
                args=config(tmp_path, use_vllm=True),
                train_dataset=conversations(),
            )


def test_speculation_cannot_be_seen_and_the_correction_sees_our_logprobs(
    model: Path, tmp_path: Path
) -> None:
    plain = run(by_generation(model, tmp_path / "none", "none", temperature=0.9))
    drafted = run(by_generation(model, tmp_path / "ngram", "ngram", temperature=0.9))
    assert drafted.accepted > 10
    assert_same_run(plain, drafted)
    differences = drafted.column("sampling/sampling_logp_difference/max")
    assert len(differences) == 3
    assert all(0 < difference < 2e-5 for difference in differences)
    ratios = drafted.column("sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0] * 3, abs=1e-4)


def test_both_ways_in_draw_the_same_samples(model: Path, tmp_path: Path) -> None:
    one = run(by_rollout_func(model, tmp_path / "func"))
    other = run(by_generation(model, tmp_path / "class"))
    assert one.completion_ids[0] == other.completion_ids[0]


def test_options_that_trainers_have(model: Path, tmp_path: Path) -> None:
    trainer = by_generation(
        model,
        tmp_path,
        max_steps=4,
        num_iterations=2,
        steps_per_generation=2,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=2,
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.2,
        vllm_importance_sampling_mode="token_truncate",
        generation_kwargs={"min_tokens": 2, "seed": 11},
        arguments={"eval_dataset": conversations().select(range(4))},
    )
    record = run(trainer)
    assert min(len(ids) for batch in record.completion_ids for ids in batch) >= 2
    assert len(record.column("eval_reward")) == 2
    engine_config = engine_of(trainer).config
    assert engine_config.model.max_context_len == 64
    assert engine_config.memory.kv_fraction == 0.2
    assert engine_config.scheduler.max_running == 8
    assert trainer.vllm_generation.llm.llm_engine.model_config.max_model_len == 64


@pytest.mark.parametrize("build", [by_rollout_func, by_generation])
def test_a_resumed_run_is_the_run_it_would_have_been(
    model: Path, tmp_path: Path, build: Callable[..., Any]
) -> None:
    whole = run(build(model, tmp_path, max_steps=4, save_strategy="steps", save_steps=2))
    resumed = run(
        build(model, tmp_path / "again", max_steps=4),
        resume_from_checkpoint=str(tmp_path / "checkpoint-2"),
    )
    assert resumed.completion_ids == whole.completion_ids[2:]
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name])


def test_adapters_come_merged_or_alone(model: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft = {"arguments": {"peft_config": lora}}
    merged = run(by_generation(model, tmp_path / "merged", **peft))
    assert max(merged.column("sampling/sampling_logp_difference/max")) < 2e-5
    assert any("lora_A" in name for name in merged.weights)
    ours = {"ours": {"adapters_only": True}, "vllm_enable_sleep_mode": True}
    assert_same_run(merged, run(by_generation(model, tmp_path / "alone", **peft, **ours)))


def test_memory_sleeps_between_batches(model: Path, tmp_path: Path) -> None:
    awake = run(by_generation(model, tmp_path / "awake"))
    trainer = by_generation(model, tmp_path / "asleep", vllm_enable_sleep_mode=True)
    assert_same_run(awake, run(trainer))
    assert not engine_of(trainer).can_run
    # An evaluation at the step whose weights it has already had, and has given away.
    trainer.eval_dataset = conversations().select(range(4))
    assert "eval_reward" in trainer.evaluate()


def test_a_later_turn_asks_nothing_of_the_other_ranks(model: Path) -> None:
    """Asleep or not: TRL's tool loop generates on those ranks alone whose samples called one."""
    with one_rank():
        generation = alone(model, enable_sleep_mode=True, max_completion_length=4)
        generation._generation._model = DistributedDataParallel(generation._model)
        generation.sync_weights()
        with mock.patch.object(distributed, "all_reduce", side_effect=AssertionError):
            generation.generate([[7, 8]], None, 1)
            assert generation.engine.released_tags == {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}
            generation.generate([[7, 8]], None, 1)
        assert generation.engine.weight_version == 1
        generation.sync_weights()
        assert generation.engine.weight_version == 2
        assert len(generation.generate([[7, 8]], None, 1)[1][0]) > 0


def test_memory_sleeps_after_a_batch_that_was_refused(model: Path) -> None:
    generation = alone(model, enable_sleep_mode=True)
    generation.sync_weights()
    with pytest.raises(InvalidInputError, match="prompt"):
        generation.generate([[7] * 500], None, 1)
    assert generation.engine.released_tags == {MemoryTag.WEIGHTS, MemoryTag.KV_CACHE}


@contextmanager
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_rloo(model: Path, tmp_path: Path) -> None:
    args = config(tmp_path)
    names = {"output_dir", "max_steps", "per_device_train_batch_size", "num_generations",
             "max_completion_length", "logging_steps", "save_strategy", "report_to",
             "disable_tqdm", "use_cpu", "bf16", "gradient_checkpointing"}  # fmt: skip
    options = {name: getattr(args, name) for name in names}
    trainer = by_generation(
        model,
        tmp_path,
        trainer=RLOOTrainer,
        arguments={"args": RLOOConfig(**options, use_vllm=True, learning_rate=1e-2)},
    )
    trainer.train()
    assert len(trainer.reward_funcs[0].completion_ids) == 3
    assert engine_of(trainer).weight_version == 3


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (
            {
                "vllm_mode": "server",
                "vllm_server_base_url": "http://127.0.0.1:9",
                "vllm_server_timeout": 0.1,
            },
            "vllm_server_base_url='http://127.0.0.1:9'",
        ),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
        ({"vllm_model_impl": "transformers"}, "vllm_model_impl"),
        ({"vllm_max_model_length": 4096}, "max_context_len=4096"),
        ({"vllm_gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization=1.5"),
        ({"generation_kwargs": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_the_trainer_is_made(
    model: Path, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInputError, match=field):
        by_generation(model, tmp_path, **options)


OURS: dict[str, Any] = {
    "spec": "ngram",
    "spec_options": spec_options("ngram"),
    "model_path": None,
    "cluster": "none",
    "cluster_options": None,
    "adapters_only": False,
    "overrides": {},
}


def alone(
    model: Path, *, fsdp_version: int | None = None, num_processes: int = 1, **options: Any
) -> SpecGeneration:
    """A generation as a trainer makes it, without the trainer."""
    plugin = None if fsdp_version is None else SimpleNamespace(fsdp_version=fsdp_version)
    accelerator = SimpleNamespace(
        process_index=0,
        num_processes=num_processes,
        mixed_precision="no",
        device=torch.device("cpu"),
        state=SimpleNamespace(fsdp_plugin=plugin),
    )
    return SpecGeneration(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        accelerator,
        AutoTokenizer.from_pretrained(model),
        **OURS | {"gpu_memory_utilization": 0.3} | options,
    )


def test_what_takes_several_gpus_to_ask_for_is_refused(model: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"vllm_tensor_parallel_size=2.*1 processes"):
        alone(model, tensor_parallel_size=2)
    with pytest.raises(InvalidInputError, match=r"vllm_tensor_parallel_size=3.*query heads"):
        alone(model, tensor_parallel_size=3, num_processes=3)
    with pytest.raises(InvalidInputError, match=r"vllm_tensor_parallel_size=2.*cluster"):
        alone(model, tensor_parallel_size=2, cluster="ray")
    with pytest.raises(InvalidInputError, match="fsdp_version=1"):
        alone(model, fsdp_version=1)


def test_what_a_server_has_for_itself_is_refused(model: Path) -> None:
    for options, field in (
        ({"tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"cluster": "ray"}, "cluster='ray'"),
        ({"overrides": {"kv_bytes": 1 << 20}}, "kv_bytes=1048576"),
    ):
        with pytest.raises(InvalidInputError, match=field):
            alone(model, mode="server", **options)
    with pytest.raises(InvalidInputError, match="vllm_mode='elsewhere'"):
        alone(model, mode="elsewhere")


def test_processes_that_would_take_replicas_from_each_other_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for given, field in (
        ({}, "address=None"),
        ({"address": "local"}, "address='local'"),
        ({"address": "auto"}, "num_cpus=None"),
    ):
        with pytest.raises(InvalidInputError, match=f"cluster_options.{field}"):
            alone(model, num_processes=2, cluster="ray", cluster_options=given)


def test_images_are_refused(model: Path) -> None:
    with pytest.raises(InvalidInputError, match="processing_class"):
        SpecGeneration(None, None, SimpleNamespace(image_processor=1), **OURS)
    generation = alone(model)
    with pytest.raises(InvalidInputError, match="images"):
        generation.generate([[3, 4]], [["an image"]], 1)


def test_no_seed_given_is_the_trainers(model: Path) -> None:
    def drawn(**options: Any) -> list[list[int]]:
        torch.manual_seed(7)
        generation = alone(model, **options)
        return generation.generate([[7, 8]] * 2, None, 2)[1]

    assert (
        drawn(generation_kwargs={"seed": None}) == drawn() == drawn(generation_kwargs={"seed": 7})
    )
    assert drawn(generation_kwargs={"seed": 0}) != drawn()


def test_several_logprobs_per_token(model: Path) -> None:
    """Logprobs are ordered like vLLM's: the most likely first, the sampled one at the end unless it
    is among them."""
    generation = alone(model, logprobs=3, max_completion_length=20)
    generation.sync_weights()
    prompts, completions, logprobs, token_ids = generation.generate([[7, 8]] * 4, None, 4)
    assert prompts == [[7, 8]] * 4
    assert logprobs is not None
    assert token_ids is not None
    sizes = set()
    for completion, likely, ids in zip(completions, logprobs, token_ids, strict=True):
        assert len(completion) == len(likely) == len(ids)
        for sampled, values, names in zip(completion, likely, ids, strict=True):
            assert sampled in names
            assert values == sorted(values, reverse=True)
            assert len(set(names)) == len(names)
            sizes.add(len(names))
    assert sizes == {3, 4}
    assert alone(model, logprobs=None).generate([[7, 8]], None, 1)[2:] == (None, None)


def test_a_completion_nobody_could_sample_is_one_token_of_unknown_logprob(model: Path) -> None:
    generation = alone(model)
    with torch.no_grad():
        generation._model.lm_head.weight.fill_(math.nan)
    generation.sync_weights()
    _, completions, logprobs, token_ids = generation.generate([[7, 8]], None, 1)
    assert (completions, logprobs, token_ids) == ([[2]], [[[None]]], [[[2]]])


def test_a_model_from_the_hub_is_found_in_its_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc123"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model, target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    named = SimpleNamespace(
        name_or_path="someone/tiny", config=SimpleNamespace(_commit_hash="abc123")
    )
    assert Path(model_folder(named)).samefile(model)
    with pytest.raises(InvalidInputError, match="someone/other"):
        model_folder(SimpleNamespace(name_or_path="someone/other", config=SimpleNamespace()))
