"""One of two processes of GRPO runs, started by test_trl_processes.py.

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
from tests.helpers.trl_runs import by_generation, run

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
# Engines sleep while a trainer that is sharded steps, and where both processes are their ranks.
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "tensor": {"vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True},
    "zero3": {"deepspeed": ZERO3, "vllm_enable_sleep_mode": True},
}
# Two steps of one prompt, half of its samples on each process.
SHARES: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 8, "max_steps": 2}


def samples_by(way: str, folder: Path) -> list[list[int]]:
    """This process's samples of the first step."""
    trainer = by_generation(folder / "model", folder / way, **SHARES, **WAYS[way])
    record = run(trainer)
    engine = trainer.vllm_generation.engine
    assert trainer.is_deepspeed_enabled == (way == "zero3")
    assert engine.tensor_ranks.size == (2 if way == "tensor" else 1)
    differences = record.column("sampling/sampling_logp_difference/max")
    assert len(differences) == 2
    assert max(differences) < 2e-5
    assert engine.weight_version == 2
    if way == "tensor":  # it sleeps without the weights, which nothing is sharded of
        trainer.vllm_generation.sync_weights()
    elif distributed.get_rank() == 0:  # as when its samples alone called a tool
        trainer.vllm_generation.generate([[7, 8]], None, 1)
    engine.resume_memory()
    digests = [None, None]
    distributed.all_gather_object(digests, engine.weights_digest())
    assert digests[0] == digests[1]
    return record.completion_ids[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_deepspeed()
    output = Path(sys.argv[1])
    output.write_text(json.dumps({way: samples_by(way, output.parent) for way in WAYS}))
    distributed.barrier()
    os._exit(0)  # DeepSpeed's threads sometimes abort while the interpreter ends
