"""Short runs of TRL's own trainers on a tiny model, and what is to be compared of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout.engine.following_rank import FollowingRank
from rollout.trainers.trl import specrollout_generation
from tests.helpers.text_model import WORDS

PROMPTS = [f"{first} {second} {first}" for first in WORDS[:4] for second in WORDS[:4]]


def conversations() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": prompt}], "wanted": prompt.split()[0]}
            for prompt in PROMPTS
        ]
    )


@dataclass
class WordReward:
    """Rewards variety and the wanted word; keeps what it was shown."""

    __name__: str = "word"
    completion_ids: list[list[list[int]]] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], wanted: list[str], **_: Any
    ) -> list[float]:
        contents = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        rewards = [
            content.split().count(word) + len(set(content.split())) / 10
            for content, word in zip(contents, wanted, strict=True)
        ]
        self.completion_ids.append(completion_ids)
        self.rewards.append(rewards)
        return rewards


def config(folder: Path, kind: Callable[..., Any] = GRPOConfig, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 24,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 5,
    }
    return kind(**defaults | options)


def spec_options(spec: str) -> dict[str, Any]:
    """Drafts whatever they cost, for a tiny model decodes too fast for any to pay."""
    return {"budget": "fixed", "calibration_seconds": 0.0} if spec == "ngram" else {}


def by_generation(
    model: Path,
    folder: Path,
    spec: str = "ngram",
    *,
    trainer: Callable[..., Any] = GRPOTrainer,
    arguments: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """``options`` are the config's, ``arguments`` the trainer's, ``ours`` the context's."""
    with specrollout_generation(spec, **{"spec_options": spec_options(spec)} | (ours or {})):
        return trainer(
            **{
                "model": str(model),
                "reward_funcs": WordReward(),
                "args": config(folder, use_vllm=True, **options),
                "train_dataset": conversations(),
            }
            | (arguments or {})
        )


@dataclass
class RunRecord:
    completion_ids: list[list[list[int]]]
    logprobs: list[torch.Tensor]  # padded [B, T], as the trainer saw them
    rewards: list[list[float]]
    weights: dict[str, torch.Tensor]
    logs: list[dict[str, float]]
    accepted: int  # on a rank that schedules

    def column(self, name: str) -> list[float]:
        return [entry[name] for entry in self.logs if name in entry]


def run(trainer: Any, resume_from_checkpoint: str | None = None) -> RunRecord:
    watcher = _BatchWatcher(trainer)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    reward, engine = trainer.reward_funcs[0], trainer.vllm_generation.engine
    return RunRecord(
        completion_ids=reward.completion_ids,
        logprobs=watcher.logprobs,
        rewards=reward.rewards,
        weights={
            name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()
        },
        logs=trainer.state.log_history,
        accepted=0 if isinstance(engine, FollowingRank) else engine.status().total.accepted,
    )


class _BatchWatcher(TrainerCallback):
    """Keeps the sampling logprobs of each batch the trainer buffers."""

    def __init__(self, trainer: Any) -> None:
        self.logprobs: list[torch.Tensor] = []
        self._trainer = trainer
        trainer.add_callback(self)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        for batch in getattr(self._trainer, "_buffered_inputs", None) or ():
            if "sampling_per_token_logps" in batch:
                self.logprobs.append(batch["sampling_per_token_logps"].clone())


def assert_same_run(first: RunRecord, second: RunRecord) -> None:
    assert first.completion_ids == second.completion_ids
    assert first.rewards == second.rewards
    assert len(first.logprobs) == len(second.logprobs)
    for one, other in zip(first.logprobs, second.logprobs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name
