"""Trainers with ``use_vllm=True`` inside specrollout_generation, without vLLM."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer, rloo_trainer

from rollout.cluster.config import ClusterConfig
from rollout.errors import InvalidInputError
from rollout.trainers.trl import specrollout_generation
from rollout.trainers.trl.engine_options import model_folder
from rollout.trainers.trl.exact import ExactLogprobs
from rollout.trainers.trl.generation import SpecGeneration
from tests.cluster.thread_pool import ThreadPool
from tests.helpers.trl_runs import assert_same_run, by_generation, run, spec_options

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_trl_is_as_it_was_outside() -> None:
    with specrollout_generation():
        assert grpo_trainer.VLLMGeneration is not VLLMGeneration
        assert rloo_trainer.VLLMGeneration is not VLLMGeneration
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert rloo_trainer.VLLMGeneration is VLLMGeneration
    assert not hasattr(Trainer, "vllm_generation")


def test_speculation_cannot_be_seen_and_the_correction_sees_our_logprobs(
    model: Path, tmp_path: Path
) -> None:
    plain = run(by_generation(model, tmp_path / "none", "none", temperature=0.9))
    drafted = run(by_generation(model, tmp_path / "ngram", "ngram", temperature=0.9))
    assert drafted.accepted > 10
    assert_same_run(plain, drafted)
    assert plain.column("specrollout/accept_length") == [1.0] * 3
    assert min(drafted.column("specrollout/accept_length")) > 1
    differences = drafted.column("sampling/sampling_logp_difference/max")
    assert len(differences) == 3
    assert all(0 < difference < 2e-5 for difference in differences)
    ratios = drafted.column("sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0] * 3, abs=1e-4)
    untrained = AutoModelForCausalLM.from_pretrained(model).lm_head.weight
    assert not torch.equal(untrained, drafted.weights["lm_head.weight"])
    usual = {"ours": {"spec_options": {}}}  # with the learned budget
    trainer = by_generation(model, tmp_path / "learned", temperature=0.9, **usual)
    learned = run(trainer)
    assert_same_run(plain, learned)
    metrics = trainer.vllm_generation.engine.metrics()
    assert metrics.forecast_steps > 0
    told = sum(learned.column("specrollout/saved_seconds"))
    assert told == pytest.approx(metrics.saved_seconds)


def test_adapters_come_merged_or_alone(model: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft = {"arguments": {"peft_config": lora}}
    merged = run(by_generation(model, tmp_path / "merged", **peft))
    assert max(merged.column("sampling/sampling_logp_difference/max")) < 2e-5
    assert any("lora_A" in name for name in merged.weights)
    ours = {"ours": {"adapters_only": True}, "vllm_enable_sleep_mode": True}
    assert_same_run(merged, run(by_generation(model, tmp_path / "alone", **peft, **ours)))


def test_a_run_with_replicas_is_that_of_one_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")

    def on_threads(config: Any, factory: Any, cluster: ClusterConfig) -> ThreadPool:
        return ThreadPool(config, factory, [f"replica-{i}" for i in range(cluster.replicas)])

    monkeypatch.setattr("rollout.cluster.ray.pool.RayPool", on_threads)
    one = run(by_generation(model, tmp_path / "one"))
    ours = {"cluster": "ray", "cluster_options": {"replicas": 2}}
    trainer = by_generation(model, tmp_path / "two", ours=ours, vllm_enable_sleep_mode=True)
    with closing(trainer.vllm_generation.engine) as cluster:
        assert_same_run(one, run(trainer))
        assert cluster.weight_version == 3


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


def test_what_cannot_be_honoured_is_refused_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nowhere = {"server_base_url": "http://127.0.0.1:9", "server_timeout": 0.1}
    two = {"num_processes": 2, "cluster": "ray"}
    for options, says in (
        ({"mode": "elsewhere"}, "vllm_mode='elsewhere'"),
        ({"mode": "server"} | nowhere, "vllm_server_base_url='http://127.0.0.1:9'"),
        ({"mode": "server", "tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2"),
        ({"structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
        ({"gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization=1.5"),
        ({"generation_kwargs": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"tensor_parallel_size": 2}, r"vllm_tensor_parallel_size=2.*1 processes"),
        ({"tensor_parallel_size": 3, "num_processes": 3}, r"tensor_parallel_size=3.*query heads"),
        ({"fsdp_version": 1}, "fsdp_version=1"),
        (two | {"cluster_options": {}}, "cluster_options.address=None"),
        (two | {"cluster_options": {"address": "auto"}}, "cluster_options.num_cpus=None"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            alone(model, **options)
    with pytest.raises(InvalidInputError, match="max_context_len=4096"):  # by TRL's own name
        by_generation(model, tmp_path, vllm_max_model_length=4096)
    with pytest.raises(InvalidInputError, match="processing_class"):
        SpecGeneration(None, None, SimpleNamespace(image_processor=1), **OURS)
    with pytest.raises(InvalidInputError, match="images"):
        alone(model).generate([[3, 4]], [["an image"]], 1)


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
    _, completions, logprobs, token_ids = generation.generate([[7, 8]] * 4, None, 4)
    for completion, likely, ids in zip(completions, logprobs, token_ids, strict=True):
        for sampled, values, names in zip(completion, likely, ids, strict=True):
            assert sampled in names
            assert values == sorted(values, reverse=True)
            assert len(set(names)) in (3, 4)
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


class ExactTrainer(ExactLogprobs, grpo_trainer.GRPOTrainer):
    pass


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_training_samples_from_the_policy_it_trains(model, tmp_path, temperature) -> None:
    options = {"temperature": temperature, "max_steps": 2, "beta": 0.0}
    record = run(by_generation(model, tmp_path, trainer=ExactTrainer, **options))
    assert len(record.column("loss")) == 2
    for statistic in ("min", "mean", "max"):
        assert record.column(f"sampling/importance_sampling_ratio/{statistic}") == [1.0, 1.0]
    assert record.column("sampling/sampling_logp_difference/max") == [0.0, 0.0]
