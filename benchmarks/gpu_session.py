"""What to run on a GPU that is there for half an hour: checks and times, the most telling first.

    python benchmarks/gpu_session.py --output runs/gpu --seconds 580
    python benchmarks/gpu_session.py --output runs/gpu --seconds 580 --stages replay generate

Each stage is a process of its own with a limit; one that fails or hangs costs no other. A stage for
which too little is left of --seconds is not begun, and one may be cut short by it; their names are
printed, for the next call. After every stage everything is in two files: session.json, with each
stage's outcome and the rows of its benchmark, and session.log, with all that was printed. What
earlier calls found stays in both until its stage is run again.

What it needs is in docs/gpu.md; the n-gram corpus is compiled first where it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LEAST_SHARE = 0.5
"""Of a stage's limit that has to be left for it to be begun: most end well before theirs."""

_LAST_WORDS_SECONDS = 10.0

NOT_BEGUN, CUT_SHORT = "not begun", "cut short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    command: Sequence[str]  # behind the interpreter
    seconds: float  # limit
    has_rows: bool = True  # it is a benchmark, and takes --json


@dataclass(slots=True, kw_only=True)
class Outcome:
    name: str
    status: str  # "ok", "failed: ...", "over its limit", "cut short", "not begun"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def stages(traces: Sequence[Path]) -> list[Stage]:
    """In the order of what they tell: is it right, does it reach its bars, where does time go."""
    given = [part for trace in traces for part in ("--trace", str(trace))]
    tests = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
    replay = ("benchmarks/bench_replay.py", *given)
    engine_tests = ("tests/gpu/test_cuda_graphs.py", "tests/gpu/test_memory.py")
    step, ops = "benchmarks/bench_step.py", ("benchmarks/bench_gpu_ops.py", "--no-tests", "--ops")
    listed: list[tuple[str, tuple[str, ...], float]] = [
        ("native", ("benchmarks/gpu_native.py",), 180),
        ("ops-tests", (*tests, "-n", "6", "tests/ops/triton", "tests/unit/test_row_invariance.py"),
         280),
        ("engine-tests", (*tests, *engine_tests), 200),
        ("device-tests", (*tests, "-n", "4", "tests/device"), 200),
        ("step-demo", (step, "--shape", "demo"), 150),
        ("step-8b", (step, "--shape", "8b"), 280),
        ("overlap", ("benchmarks/bench_overlap.py", "--shape", "8b", "--shape", "demo"), 300),
        ("ops", (*ops, "step"), 280),
        ("replay", (*replay, "--spec", "ngram", "--shape", "8b"), 500),
        ("replay-hybrid", (*replay, "--spec", "hybrid", "--shape", "8b", "--steps", "2"), 400),
        ("recurrent", (*ops, "recurrent"), 150),
        ("replay-32b", (*replay, "--spec", "ngram", "--shape", "32b", "--steps", "1"), 550),
        ("generate", ("benchmarks/bench_generate.py", "--shape", "8b"), 400),
        ("examples", (*tests, "tests/gpu/test_examples.py"), 400),
    ]  # fmt: skip
    return [
        Stage(name=name, command=command, seconds=seconds, has_rows="bench_" in command[0])
        for name, command, seconds in listed
    ]


def run(chosen: Sequence[Stage], output: Path, seconds: float) -> list[Outcome]:
    """Run what fits, in order, and keep both files up to date."""
    output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    results = output / "session.json"
    written = {each["name"]: each for each in _written(results)}
    with (output / "session.log").open("a") as log:
        for stage in chosen:
            left = deadline - time.monotonic()
            if left < _LEAST_SHARE * stage.seconds:
                outcomes.append(Outcome(name=stage.name, status=NOT_BEGUN))
            else:
                print(f"{stage.name} ...", flush=True)
                outcomes.append(_run(stage, left - _LAST_WORDS_SECONDS, log))
                print(f"{stage.name}: {outcomes[-1].status}", flush=True)
            if stage.name not in written or outcomes[-1].status != NOT_BEGUN:
                written[stage.name] = asdict(outcomes[-1])
            results.write_text(json.dumps(list(written.values()), indent=1) + "\n")
    return outcomes


def _written(results: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(results.read_text()) if results.exists() else []
    except ValueError as error:  # never written over: it may be all there is of an hour on a GPU
        raise SystemExit(f"{results}: {error}; move it away, or choose another --output") from error


def _run(stage: Stage, left: float, log: Any) -> Outcome:
    log.write(f"\n=== {stage.name}\n")
    log.flush()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, *stage.command]
        if stage.has_rows:
            command += ["--json", str(rows)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_heed_interrupts,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            status = process.wait(min(left, stage.seconds))
            result = "ok" if status == 0 else f"failed: exit status {status}"
        except subprocess.TimeoutExpired:
            result = "over its limit" if stage.seconds <= left else CUT_SHORT
            _interrupt(process)
        finally:
            with suppress(ProcessLookupError):  # all it started too: its group is its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = json.loads(rows.read_text()) if rows.exists() else []
    return Outcome(
        name=stage.name, status=result, seconds=round(time.monotonic() - started, 1), rows=found
    )


def _heed_interrupts() -> None:
    """What is started in the background inherits that they are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """What it has found so far is told when it is interrupted."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WORDS_SECONDS)


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--output", type=Path, default=Path("runs/gpu"))
    arguments.add_argument("--seconds", type=float, default=1700.0, help="for all of it")
    arguments.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    names = [stage.name for stage in stages([])]
    arguments.add_argument("--stages", nargs="+", choices=names, help="default: all")
    options = arguments.parse_args(arguments_given)
    traces = [path.resolve() for path in options.trace]
    chosen = [stage for stage in stages(traces) if stage.name in (options.stages or names)]
    outcomes = run(chosen, options.output, options.seconds)
    for outcome in outcomes:
        missed = [row for row in outcome.rows if row["ok"] is False]
        print(f"{outcome.name:14} {outcome.seconds:6.0f} s  {outcome.status}, {len(missed)} missed")
        for row in missed:
            print(f"    {row['name']}: {row['value']} {row['unit']}, bar {row['bar']}")
    if left := [each.name for each in outcomes if each.status in (NOT_BEGUN, CUT_SHORT)]:
        print("not begun or cut short: --stages", *left)


if __name__ == "__main__":
    main()
