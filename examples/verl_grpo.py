"""GRPO on small sums, by verl's trainer with specrollout's rollouts.

    pip install torch==2.13.0 '.[verl]'
    python examples/verl_grpo.py --model models/SmolLM2-135M-Instruct

What follows the options goes to verl.trainer.main_ppo as it is, and overrides what is set here:
``trainer.total_training_steps=50 actor_rollout_ref.rollout.n=8``.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pandas as pd


def write_prompts(path: Path, count: int = 512, seed: int = 0) -> Path:
    """Sums of two numbers, each prompt once, in the columns verl reads."""
    pairs = random.Random(seed).sample(list(product(range(30), repeat=2)), count)
    rows = []
    for index, (a, b) in enumerate(pairs):
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{a} + {b} = ? Answer with the number."}],
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index},
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)
    return path


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """verl calls this: 1 for the right number, else a little for answering in digits at all."""
    if ground_truth in solution_str.split():
        return 1.0
    return 0.2 * sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder with a checkpoint and tokenizer")
    parser.add_argument("--workers", type=int, default=1, help="devices, and so replicas")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("runs/verl_grpo"))
    arguments, overrides = parser.parse_known_args()
    prompts = write_prompts(arguments.folder / "prompts.parquet").resolve()
    rollout = "actor_rollout_ref.rollout"
    settings = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={Path(arguments.model).resolve()}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"{rollout}.name=specrollout",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n=4",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"+{rollout}.engine_kwargs.specrollout.spec=ngram",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"trainer.n_gpus_per_node={arguments.workers}",
        f"trainer.total_training_steps={arguments.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
    ]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings, *overrides]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
