"""Runs examples/verl_grpo.py on a CPU, in Ray processes of its own, and reads what verl logged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RAY_IS_SLOW = "The current node timed out during startup"  # Ray waits 30 s, and can't be told more
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
)


@dataclass(frozen=True, slots=True)
class Outcome:
    return_code: int
    steps: list[dict[str, Any]]  # verl's metrics, one mapping per training step
    samples: list[dict[str, Any]]  # verl's own record: step, uid, input, output, gts, score
    output: str


def run_main_ppo(
    model: Path,
    folder: Path,
    *overrides: str,
    workers: int = 1,
    pretended_gpus: int | None = None,
    steps: int = 2,
    timeout: float = 1500.0,
) -> Outcome:
    """Raises TimeoutError, with the output's end, when it hangs; leaves no process behind."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, log, samples = folder / "metrics.jsonl", folder / "output.log", folder / "samples"
    gpus = workers if pretended_gpus is None else pretended_gpus
    command = [
        *(sys.executable, str(EXAMPLE), "--model", str(model), "--folder", str(folder)),
        *("--workers", str(workers), "--steps", str(steps)),
        *ON_A_CPU,
        f"+ray_kwargs.ray_init.num_gpus={gpus}",
        f"trainer.rollout_data_dir={samples}",
        *overrides,
    ]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # under which verl registers its FSDP engine
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "10000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # Ray's sockets lie in its folder, and a socket's path must be short.
    with (
        TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as ray,
        log.open("w") as output,
    ):
        command.append(f"+ray_kwargs.ray_init._temp_dir={ray}")
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"main_ppo hangs:\n{log.read_text()[-4000:]}") from None
        finally:
            _end_session(process.pid)
    written = log.read_text()
    if code and RAY_IS_SLOW in written:  # nothing of the run has begun
        again = {"workers": workers, "pretended_gpus": pretended_gpus, "steps": steps}
        return run_main_ppo(model, folder, *overrides, **again, timeout=timeout)
    metrics_by_step = [line["data"] for file in folder.glob(metrics.name) for line in _lines(file)]
    rows = [line for file in sorted(samples.glob("*.jsonl")) for line in _lines(file)]
    return Outcome(code, metrics_by_step, rows, written)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _end_session(leader: int) -> None:
    """All processes that Ray started from here: they share the session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if session == leader:
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
