"""The stages of the two calls of a session on a GPU: a name, a command, a limit in seconds.

A command is what follows the interpreter. In it `{output}` is the session's folder, `{rows}` its
rows.jsonl and `{report}` pytest's report of the stage.
"""

from __future__ import annotations

from dataclasses import dataclass

_PYTEST = (
    "-m pytest -m gpu -p no:cacheprovider -vv --tb=short --continue-on-collection-errors "
    "--junitxml={report} "
)
_OP_TESTS = (
    "-n 10 -k 'bfloat16 or not float' tests/ops tests/ops/extended/triton "
    "tests/models/test_row_invariance.py"
)


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    command: str
    seconds: float
    decides: bool = False  # the call ends where a row of it misses its bar


def _benchmark(name: str, options: str = "") -> str:
    return f"benchmarks/{name}.py --json {{rows}}{options}"


CALLS = {
    "first": (  # nine minutes
        Stage("setup", "benchmarks/gpu_setup.py", 40),
        Stage("smoke", _benchmark("gpu_smoke"), 100, decides=True),
        Stage("graph-tests", _PYTEST + "tests/gpu/test_cuda_graphs.py", 60),
        Stage("memory-tests", _PYTEST + "tests/gpu/test_memory.py", 50),
        Stage("profile", _benchmark("profile_step", " --traces {output}"), 90),
        Stage("step", _benchmark("bench_step"), 100),
        Stage("ops", _benchmark("bench_gpu_ops", " --ranks 1 2 4 8"), 60),
    ),
    "second": (  # four minutes
        Stage("setup", "benchmarks/gpu_setup.py", 20),
        Stage("replay", _benchmark("bench_replay", " --spec none ngram"), 80),
        Stage("neural", _benchmark("bench_replay", " --spec eagle hybrid"), 80),
        Stage("op-tests", _PYTEST + _OP_TESTS, 60),
    ),
}
