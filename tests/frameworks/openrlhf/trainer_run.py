"""OpenRLHF's trainer through our launcher, in a process of its own, on fake GPUs."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.launch import extensions_never_compiled

EXAMPLE = Path(__file__).parents[3] / "examples" / "openrlhf_grpo.sh"
CPU_ONLY = Path(__file__).parent / "cpu_only"
_RAY_IS_SLOW = "The current node timed out during startup"  # Ray waits 30 s, and can't be told more
_STATUS = re.compile(r"Global step (\d+): (\{.*\})")


@dataclass
class TrainerRun:
    steps: list[dict[str, float]]  # what OpenRLHF logged of each training step
    queries: list[str]  # prompt and response of each sample, as they were rewarded
    log: str


def run_trainer(
    task: Path, arguments: str, *, float32: bool = False, timeout: float = 1500
) -> TrainerRun:
    """The example's script on `tiny_task`'s files, three steps of 4 prompts x 2 samples.

    ``arguments`` go over those here and over the script's. ``float32``: parameters, which
    OpenRLHF has no argument for. Raises AssertionError with the end of the log when the trainer
    fails or has not ended after ``timeout`` seconds.
    """
    text = f"""
        {task}/model {task}/prompts.jsonl {task}/reward.py
        --vllm.sync_backend gloo --ds.attn_implementation eager --actor.adam.lr 1e-2
        --data.max_len 64 --data.max_samples 12 --rollout.max_new_tokens 24
        --rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --rollout.micro_batch_size 2
        --train.batch_size 8 --train.micro_batch_size 2
        --ckpt.output_dir {task}/out --ckpt.path {task}/checkpoints
        --specrollout.device cpu --specrollout.kv_bytes 4000000 {arguments}"""
    with tempfile.TemporaryDirectory(prefix="ray-") as ray_folder:
        log, queries = Path(ray_folder) / "log.txt", Path(ray_folder) / "queries.jsonl"
        queries.touch()
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {
            "PYTHONPATH": os.pathsep.join([str(CPU_ONLY), os.environ.get("PYTHONPATH", "")]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 6, "GPU": 4}',
            "RAY_TMPDIR": ray_folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_prestart_worker_first_driver": "0",
            "QUERIES": str(queries),
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(extensions_never_compiled(Path(ray_folder))),
            "OPENRLHF_FLOAT32": "1" if float32 else "",
        }
        command = ["sh", str(EXAMPLE), *text.split()]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process)
        written = log.read_text(errors="replace")
        asked = [json.loads(line) for line in queries.read_text().splitlines()]
    if code and _RAY_IS_SLOW in written:  # nothing of the run has begun
        return run_trainer(task, arguments, float32=float32, timeout=timeout)
    assert code == 0, f"ended with {code} after at most {timeout} s:\n{written[-6000:]}"
    steps = [ast.literal_eval(found[2]) for found in _STATUS.finditer(written)]
    return TrainerRun(steps, asked, written)


def _kill(process: subprocess.Popen) -> None:
    """End what is left of its session: Ray gives its processes groups of their own."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait(10)
