"""OpenRLHF's trainer through our launcher, in a process of its own, on fake GPUs."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.frameworks.shared.ray_sessions import run_with_ray
from tests.helpers.launch import extensions_never_compiled

EXAMPLE = Path(__file__).parents[3] / "examples" / "openrlhf_grpo.sh"
CPU_ONLY = Path(__file__).parent / "cpu_only"
_STATUS = re.compile(r"Global step (\d+): (\{.*\})")


@dataclass
class TrainerRun:
    steps: list[dict[str, float]]  # what OpenRLHF logged of each training step
    queries: list[str]  # prompt and response of each sample, as they were rewarded
    log: str


def run_trainer(task: Path, arguments: str, *, float32: bool = False) -> TrainerRun:
    """The example's script on `tiny_task`'s files, three steps of 4 prompts x 2 samples.

    ``arguments`` go over those here and over the script's. ``float32``: parameters, which
    OpenRLHF has no argument for. Raises AssertionError with the end of the log when the trainer
    fails.
    """
    text = f"""
        {task}/model {task}/prompts.jsonl {task}/reward.py
        --vllm.sync_backend gloo --ds.attn_implementation eager --actor.adam.lr 1e-2
        --data.max_len 64 --data.max_samples 12 --rollout.max_new_tokens 24
        --rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --rollout.micro_batch_size 2
        --train.batch_size 8 --train.micro_batch_size 2
        --ckpt.output_dir {task}/out --ckpt.path {task}/checkpoints
        --specrollout.device cpu --specrollout.kv_bytes 4000000 {arguments}"""
    queries = task / "queries.jsonl"
    queries.write_text("")
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_OVERRIDE_RESOURCES": '{"CPU": 6, "GPU": 4}',
        "QUERIES": str(queries),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(extensions_never_compiled(task)),
        "OPENRLHF_FLOAT32": "1" if float32 else "",
    }
    run = run_with_ray(
        ["sh", str(EXAMPLE), *text.split()], environment=environment, path=[CPU_ONLY]
    )
    assert run.return_code == 0, run.output[-6000:]
    steps = [ast.literal_eval(found[2]) for found in _STATUS.finditer(run.worker_logs)]
    rewarded = [json.loads(line) for line in queries.read_text().splitlines()]
    return TrainerRun(steps, rewarded, run.worker_logs)
