"""The stages of a session on a GPU, in the order of what they tell.

Is it right, does it reach its bars, where does time go; then operators and rollouts; tests last.
Where there is no GPU stages that need none run at a size that shows that they do, and the others
are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SETUP, SMOKE = "setup", "smoke"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    command: Sequence[str]  # behind the interpreter
    seconds: float  # limit
    rows: bool = True  # it is a benchmark, and takes --json
    floors: bool = False  # it takes --floors
    traces: bool = False  # it takes --traces
    tests: bool = False  # it is pytest
    needs_gpu: bool = False


def stages(
    traces: Sequence[Path] = (), wheels: Path = Path("build/gpu-wheels"), *, on_gpu: bool = True
) -> list[Stage]:
    """``traces``: recorded rollouts, for replays."""

    def sized(on_a_gpu: str, elsewhere: str) -> tuple[str, ...]:
        return tuple((on_a_gpu if on_gpu else elsewhere).split())

    step = "benchmarks/bench_step.py"
    steps = sized("--shape 8b --context 2048", "--context 80")
    ops = ("benchmarks/bench_gpu_ops.py", "--ops")
    given = [part for trace in traces for part in ("--trace", str(trace))]
    replay = ("benchmarks/bench_replay.py", *given)
    return [
        Stage(
            name=SETUP, seconds=150, rows=False,
            command=("benchmarks/gpu_setup.py", "--wheels", str(wheels)),
        ),
        Stage(name=SMOKE, seconds=150, command=("benchmarks/gpu_smoke.py",)),
        Stage(
            name="step", seconds=240, floors=True,
            command=(step, *steps, *sized("--batch 1 8 32", "--batch 1 2")),
        ),
        Stage(
            name="profile", seconds=120, traces=True,
            command=(
                "benchmarks/profile_step.py", *steps,
                *sized("--case 1 --case 8 --case 32 --case 8+8", "--case 1 --case 2+3"),
            ),
        ),
        Stage(
            name="step-256", seconds=240, floors=True,
            command=(step, *steps, *sized("--batch 256", "--batch 4")),
        ),
        Stage(
            name="step-uneven", seconds=150, floors=True,
            command=(
                step, *steps, "--lengths", "straggler", "mixed",
                *sized("--batch 16 32", "--batch 2"),
            ),
        ),
        Stage(
            name="step-demo", seconds=100, floors=True,
            command=(step, *sized("--shape demo --context 2048", "--context 80 --batch 1")),
        ),
        Stage(
            name="ops", seconds=200, floors=True, needs_gpu=True, command=(*ops, "step")
        ),
        Stage(name="sweep", seconds=180, needs_gpu=True, command=(*ops, "sweep")),
        Stage(
            name="replay", seconds=280, floors=True,
            command=(*replay, "--spec", "ngram", *sized("--shape 8b", "--steps 1")),
        ),
        Stage(
            name="sleep", seconds=120,
            command=("benchmarks/bench_sleep.py", *sized("--shape 8b", "")),
        ),
        _tests("graph-tests", 120, "tests/gpu/test_cuda_graphs.py"),
        _tests("op-tests", 280, "-k", "bfloat16 or not float", "-n", "8", "tests/ops",
               "tests/ops/extended/triton", "tests/models/test_row_invariance.py"),
        _tests("device-tests", 200, "-k", "bfloat16 or not float", "-n", "8", "tests/device"),
        _tests("memory-tests", 100, "tests/gpu/test_memory.py"),
        _tests("other-dtype-tests", 280, "-k", "float and not bfloat16", "-n", "8", "tests/device",
               "tests/ops", "tests/ops/extended/triton", "tests/models/test_row_invariance.py"),
        Stage(name="ops-recurrent", seconds=150, needs_gpu=True, command=(*ops, "recurrent")),
        Stage(
            name="replay-hybrid", seconds=300, floors=True, needs_gpu=True,
            command=(*replay, "--spec", "hybrid", "--shape", "8b", "--steps", "2"),
        ),
        Stage(
            name="replay-32b", seconds=400, floors=True, needs_gpu=True,
            command=(*replay, "--spec", "ngram", "--shape", "32b", "--steps", "1"),
        ),
        Stage(
            name="generate", seconds=400, needs_gpu=True,
            command=("benchmarks/bench_generate.py", "--shape", "8b"),
        ),
    ]  # fmt: skip


def _tests(name: str, seconds: float, *which: str) -> Stage:
    """Each test is told as it ends."""
    command = (
        "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-vv", "--tb=short",
        "--continue-on-collection-errors",
    )  # fmt: skip
    return Stage(
        name=name, command=(*command, *which), seconds=seconds, rows=False, tests=True,
        needs_gpu=True,
    )  # fmt: skip
