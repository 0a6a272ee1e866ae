"""GRPOTrainer(rollout_func=SpecRollout(engine)), with the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from safetensors.torch import load_file
from transformers import TrainerCallback

from rollout.errors import InvalidInputError
from rollout.types import SamplingParams
from tests.helpers.trl_runs import (
    WordReward,
    assert_same_run,
    by_rollout_func,
    conversations,
    run,
    texts,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_speculation_cannot_be_seen_in_a_run(model: Path, tmp_path: Path) -> None:
    plain = run(by_rollout_func(model, tmp_path / "none", "none"))
    drafted = run(by_rollout_func(model, tmp_path / "ngram", "ngram"))
    assert drafted.accepted > 10
    assert plain.accepted == 0
    assert_same_run(plain, drafted)
    untrained = load_file(model / "model.safetensors")
    assert not any(torch.equal(untrained[name], plain.weights[name]) for name in untrained)


def test_the_engine_generates_with_the_weights_of_the_step(model: Path, tmp_path: Path) -> None:
    """Each batch's logprobs are those the trainer's model has before that step's update."""
    trainer = by_rollout_func(model, tmp_path, gradient_accumulation_steps=2, temperature=0.8)
    differences: list[float] = []

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            for batch in trainer._buffered_inputs:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                with torch.no_grad():
                    own, _, _ = trainer._get_per_token_logps_and_entropies(
                        trainer.model, ids, mask, batch["completion_ids"].shape[1]
                    )
                kept = batch["completion_mask"].bool()
                differences.append(
                    (own - batch["sampling_per_token_logps"])[kept].abs().max().item()
                )

    trainer.add_callback(Compare())
    run(trainer)
    assert len(differences) == 6
    assert max(differences) < 2e-5  # logits of this model are tens: float32 itself is off by 5e-6


def test_samples_of_a_prompt_differ_and_prompts_may_be_text(model: Path, tmp_path: Path) -> None:
    options = {"max_steps": 1, "per_device_train_batch_size": 8}
    trainer = by_rollout_func(model, tmp_path, arguments={"train_dataset": texts()}, **options)
    (completions,) = run(trainer).completion_ids
    assert len({tuple(ids) for ids in completions}) == 8


def test_options_that_trainers_have(model: Path, tmp_path: Path) -> None:
    """Iterations, several batches per generation, evaluation, checkpoints, truncation."""
    rewards = [WordReward(), lambda completions, **_: [1.0] * len(completions)]
    trainer = by_rollout_func(
        model,
        tmp_path,
        max_steps=4,
        num_iterations=2,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=2,
        beta=0.1,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.05,
        mask_truncated_completions=True,
        generation_kwargs={"min_new_tokens": 2, "stop_strings": ["word20"]},
        chat_template_kwargs={"continue_final_message": False},
        arguments={"reward_funcs": rewards, "eval_dataset": conversations().select(range(4))},
    )
    record = run(trainer)
    lengths = [len(ids) for batch in record.completion_ids for ids in batch]
    assert min(lengths) >= 2
    assert len(record.column("eval_reward")) == 2


def test_the_best_model_loaded_at_the_end_is_evaluated(model: Path, tmp_path: Path) -> None:
    trainer = by_rollout_func(
        model,
        tmp_path,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="step",
        greater_is_better=False,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        arguments={"eval_dataset": conversations().select(range(2))},
    )

    class FirstIsBest(TrainerCallback):
        def on_evaluate(
            self, _args: Any, state: Any, _control: Any, metrics: dict[str, float], **_: Any
        ) -> None:
            metrics["eval_step"] = state.global_step

    trainer.add_callback(FirstIsBest())
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    trainer.evaluate()
    served = trainer.rollout_func.engine.get_weights_by_name("lm_head.weight", 100)
    assert served == trainer.model.lm_head.weight.flatten()[:100].tolist()


def test_training_again_begins_with_the_weights_it_ended_with(model: Path, tmp_path: Path) -> None:
    trainer = by_rollout_func(model, tmp_path, max_steps=1)
    trainer.train()
    trainer.train()
    assert trainer.rollout_func.engine.weight_version == 2


def test_empty_completions_do_not_stop_a_run(model: Path, tmp_path: Path) -> None:
    """A model whose logits are no numbers can emit nothing at all."""
    trainer = by_rollout_func(model, tmp_path, max_steps=2)

    class Break(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            with torch.no_grad():
                trainer.model.lm_head.weight.fill_(float("nan"))

    trainer.add_callback(Break())
    record = run(trainer)
    assert record.completion_ids[1] == [[2]] * 4
    assert trainer._buffered_inputs[0]["tool_mask"][:, 0].tolist() == [0] * 4  # not trained on


def test_memory_sleeps_between_batches(model: Path, tmp_path: Path) -> None:
    awake = run(by_rollout_func(model, tmp_path / "awake"))
    trainer = by_rollout_func(model, tmp_path / "asleep", sleep=True)
    assert_same_run(awake, run(trainer))
    assert not trainer.rollout_func.engine.can_run


def test_what_cannot_be_honoured_is_refused_before_anything_runs(
    model: Path, tmp_path: Path
) -> None:
    trainer = by_rollout_func(model, tmp_path, generation_kwargs={"num_beams": 2})
    with pytest.raises(InvalidInputError, match="num_beams"):
        trainer.train()
    trainer.tools = [print]
    with pytest.raises(InvalidInputError, match=r"tools.*specrollout_generation"):
        trainer.rollout_func(["one two"], trainer)
    assert trainer.rollout_func.engine.metrics().steps == 0


def test_one_rollout_func_serves_one_trainer(model: Path, tmp_path: Path) -> None:
    first = by_rollout_func(model, tmp_path / "first", max_steps=1)
    run(first)
    arguments = {"rollout_func": first.rollout_func}
    second = by_rollout_func(model, tmp_path / "second", arguments=arguments)
    with pytest.raises(InvalidInputError, match="serves one trainer"):
        second.train()


def test_a_prompt_too_long_leaves_the_engine_clean(model: Path, tmp_path: Path) -> None:
    trainer = by_rollout_func(model, tmp_path)
    trainer.train_dataset = conversations().map(
        lambda row: {"prompt": [{"role": "user", "content": "one " * 200}]}
    )
    with pytest.raises(InvalidInputError, match="prompt"):
        trainer.train()
    engine = trainer.rollout_func.engine
    assert not engine.has_unfinished
    assert engine.generate([[3, 4]], SamplingParams(max_new_tokens=2))
    engine.check_integrity()
