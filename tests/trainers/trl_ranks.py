"""One of several processes of a GRPO run, started by test_trl_processes.py.

The model's folder is beside its output file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from rollout.trainers.deepspeed import prepare_deepspeed
from tests.helpers.trl_runs import by_generation, by_rollout_func, engine_of, run

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
# Two steps of one prompt, half of its samples on each process.
SHARES: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 8, "max_steps": 2}


def by_way(way: str, folder: Path) -> dict[str, Any]:
    """``generation`` is sharded by ZeRO-3, and its engine sleeps while the trainer steps; so does
    that of ``tensor``, whose ranks are both processes."""
    build, options = by_rollout_func, {}
    if way == "generation":
        build, options = by_generation, {"deepspeed": ZERO3, "vllm_enable_sleep_mode": True}
    elif way == "tensor":
        build = by_generation
        options = {"vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True}
    trainer = build(folder / "model", folder / way, **SHARES, **options)
    record = run(trainer)
    engine = engine_of(trainer)
    num_ranks = engine.worker.ranks.tensor.size
    if way != "rollout_func":
        # As when its samples alone called a tool; ranks of one model do so together.
        if way == "generation" and distributed.get_rank() == 0:
            trainer.vllm_generation.generate([[7, 8]], None, 1)
        engine.resume_memory()
    version = engine.weight_version
    if way == "tensor":  # it sleeps without the weights, which nothing is sharded of
        trainer.vllm_generation.sync_weights()
    return {
        "sharded": trainer.is_deepspeed_enabled,
        "ranks": num_ranks,
        "completion_ids": record.completion_ids,
        "digest": engine.weights_digest(),
        "version": version,
        "logp_differences": record.column("sampling/sampling_logp_difference/max"),
    }


def main(output: Path) -> None:
    results = {way: by_way(way, output.parent) for way in ("rollout_func", "tensor", "generation")}
    output.write_text(json.dumps(results))
    distributed.barrier()
    os._exit(0)  # DeepSpeed's threads sometimes abort while the interpreter ends


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_deepspeed()
    main(Path(sys.argv[1]))
