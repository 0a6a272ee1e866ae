"""GRPO with TRL's own trainer, generating with this engine: sums, rewarded for the right answer.

python examples/trl_grpo.py [MODEL_FOLDER] [--max-steps N] [--spec none|ngram]
"""

import argparse
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rollout.trainers.trl import specrollout_generation

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="models/SmolLM2-135M-Instruct")
parser.add_argument("--max-steps", type=int, default=30)
parser.add_argument("--max-completion-length", type=int, default=32)
parser.add_argument("--spec", default="ngram")
parser.add_argument("--output-dir", default="runs/trl")
options = parser.parse_args()

sums = reasoning_gym.create_dataset(
    "chain_sum", size=200, seed=7, min_terms=2, max_terms=2, min_digits=1, max_digits=1
)
dataset = Dataset.from_list(
    [
        {
            "prompt": [{"role": "user", "content": f"{sum['question']} Give the number."}],
            "answer": sum["answer"],
        }
        for sum in sums
    ]
)


def right_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer and nothing else, half of it for the answer among other words."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [
        1.0 if text == right else 0.5 * (right in text.replace(".", " ").split())
        for text, right in zip(texts, answer, strict=True)
    ]


args = GRPOConfig(
    output_dir=options.output_dir,
    max_steps=options.max_steps,
    use_vllm=True,  # which is this engine, inside specrollout_generation
    per_device_train_batch_size=16,
    num_generations=8,
    max_completion_length=options.max_completion_length,
    learning_rate=1e-5,
    bf16=torch.cuda.is_available(),  # the engine computes in what the trainer's forward does
    use_cpu=not torch.cuda.is_available(),
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
with specrollout_generation(options.spec):
    trainer = GRPOTrainer(
        model=options.model, reward_funcs=right_answer, args=args, train_dataset=dataset
    )
trainer.train()

metrics = trainer.vllm_generation.engine.metrics()
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
print("reward by step: " + " ".join(f"{reward:.2f}" for reward in rewards))
print(
    f"{metrics.generated_tokens} tokens in {metrics.target_forwards} forwards, "
    f"{metrics.accepted} of {metrics.drafted} drafted tokens accepted"
)
