"""Options of TRL's trainers, resumed runs, sleep and evaluation, in short runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from trl import RLOOConfig, RLOOTrainer

from tests.helpers.trl_runs import by_generation, config, conversations, run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_options_of_a_trainer_with_vllms_names(model: Path, tmp_path: Path) -> None:
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
    engine_config = trainer.vllm_generation.engine.config
    assert engine_config.model.max_context_len == 64
    assert engine_config.memory.kv_fraction == 0.2
    assert engine_config.scheduler.max_running == 8
    assert trainer.vllm_generation.llm.llm_engine.model_config.max_model_len == 64


def test_a_resumed_run_is_the_run_it_would_have_been(model: Path, tmp_path: Path) -> None:
    """Awake or asleep between batches."""
    whole = run(by_generation(model, tmp_path, max_steps=4, save_strategy="steps", save_steps=2))
    resumed = run(
        by_generation(model, tmp_path / "again", max_steps=4, vllm_enable_sleep_mode=True),
        resume_from_checkpoint=str(tmp_path / "checkpoint-2"),
    )
    assert resumed.completion_ids == whole.completion_ids[2:]
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name])


def test_rloo(model: Path, tmp_path: Path) -> None:
    args = config(tmp_path, kind=RLOOConfig, use_vllm=True)
    trainer = by_generation(model, tmp_path, trainer=RLOOTrainer, arguments={"args": args})
    trainer.train()
    assert len(trainer.reward_funcs[0].completion_ids) == 3
    assert trainer.vllm_generation.engine.weight_version == 3
