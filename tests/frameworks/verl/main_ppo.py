"""Runs examples/verl_grpo.py on a CPU, in Ray processes of its own, and reads what verl logged."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_sessions import run_with_ray

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "verl_grpo.py"

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
FLOAT32 = "param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32"
ON_A_CPU = (
    "trainer.device=cpu",
    "trainer.resume_mode=disable",
    "trainer.logger=[console,file]",
    "ray_kwargs.ray_init.num_cpus=32",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    f"+{ACTOR}.fsdp_config.mixed_precision={{{FLOAT32}}}",
    f"{ACTOR}.fsdp_config.use_torch_compile=False",
    f"{ACTOR}.use_torch_compile=False",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.agent.num_workers=1",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1",
    f"+{ROLLOUT}.engine_kwargs.specrollout.kv_bytes=33554432",
    f"+{ROLLOUT}.engine_kwargs.specrollout.num_threads=1",
    f"+{ROLLOUT}.engine_kwargs.specrollout.spec_options.calibration_seconds=0",
    f"+{ROLLOUT}.engine_kwargs.specrollout.spec_options.budget=fixed",
    "reward.num_workers=1",
    "data.dataloader_num_workers=0",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    steps: list[dict[str, Any]]  # verl's metrics, one mapping per training step
    samples: list[dict[str, Any]]  # verl's own record: step, uid, input, output, gts, score
    worker_logs: str


def run_main_ppo(
    model: Path,
    folder: Path,
    *overrides: str,
    workers: int,
    pretended_gpus: int = 2,
    steps: int = 2,
) -> Outcome:
    """Raises AssertionError, with the output's end, when it fails; leaves no process behind."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, samples = folder / "metrics.jsonl", folder / "samples"
    command = [
        *(sys.executable, str(EXAMPLE), "--model", str(model), "--folder", str(folder)),
        *("--workers", str(workers), "--steps", str(steps)),
        *ON_A_CPU,
        f"+ray_kwargs.ray_init.num_gpus={pretended_gpus}",
        f"trainer.rollout_data_dir={samples}",
        *overrides,
    ]
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # under which verl registers its FSDP engine
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(pretended_gpus))),
        "TOKENIZERS_PARALLELISM": "false",
    }
    run = run_with_ray(command, environment=environment, path=[HERE], cwd=folder)
    assert run.return_code == 0, run.output[-6000:]
    rows = [line for file in sorted(samples.glob("*.jsonl")) for line in _lines(file)]
    return Outcome([line["data"] for line in _lines(metrics)], rows, run.worker_logs)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
