"""One of several processes of a GRPO run; writes what it saw to a file.

torchrun-like variables come with the environment.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.helpers.trl_runs import by_generation, by_rollout_func, engine_of, run

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--way", choices=["func", "class"])
    parser.add_argument("--zero3", action="store_true")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    # Two prompts of four samples: each prompt's samples are on both processes.
    more: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 8, "max_steps": 2}
    if options.zero3:
        more |= {"deepspeed": ZERO3}
    build = by_rollout_func if options.way == "func" else by_generation
    trainer = build(options.model, options.output / "run", **more)
    record = run(trainer)
    engine = engine_of(trainer)
    (options.output / f"rank{rank}.json").write_text(
        json.dumps(
            {
                "completion_ids": record.completion_ids,
                "digest": engine.weights_digest(),
                "version": engine.weight_version,
                "logs": record.logs,
            }
        )
    )
    distributed.barrier()
    os._exit(0)  # DeepSpeed's threads sometimes abort while the interpreter ends


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
