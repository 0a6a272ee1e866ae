"""Question: is all of this right on a GPU, and how fast? Two calls of a machine lent for a quarter
of an hour answer.

    make gpu-bundle
    python3 benchmarks/gpu_session.py first --output FOLDER
    python3 benchmarks/gpu_session.py second --output FOLDER --trace rollouts.npz

Each stage (`gpu_stages.py`) is a process of its own; one that runs over its limit is killed and the
next begins. Where the bits of `smoke` differ nothing else is worth its time, and the call ends.
`--stage` runs some of the call's stages, after `setup`. Without a GPU benchmarks run at their
smallest size and tests are skipped: a rehearsal.

The folder has rows.jsonl, each row as it comes, between marks of the stages; session.log, all that
was printed; and traces of a few steps: at most 8 files of at most 16 MiB. A call into the same
folder adds to it. The exit status is 0 where every stage went well; bars that were missed do not
count.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_stages import CALLS, Stage
from harness.rows import append_record, read_records

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
OK, NOT_BEGUN = "ok", "not begun"

_MIN_SECONDS = 15.0
"""A stage for which less is left is not begun."""

_LAST_WORDS_SECONDS = 5.0
_LAST_WORDS = 1500
"""Characters of a failed stage's output that are printed too."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    name: str
    status: str  # "ok", "failed: ...", "over its limit", "not begun"
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def missed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("ok") is False]


def run(stages: Sequence[Stage], output: Path, seconds: float, more: str = "") -> list[Outcome]:
    """Run the stages in order, for so many seconds in all. ``more``: options of benchmarks."""
    output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    ended = False
    for stage in stages:
        left = deadline - time.monotonic()
        if ended or left < min(_MIN_SECONDS, stage.seconds):
            outcomes.append(Outcome(name=stage.name, status=NOT_BEGUN))
            continue
        print(f"{stage.name} ...", flush=True)
        outcome = _run(stage, min(left, stage.seconds), output, more)
        outcomes.append(outcome)
        for row in outcome.missed:
            print(f"  missed: {row['name']}: {row['value']} {row['unit']}, bar {row['bar']}")
        print(f"{stage.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
        ended = stage.decides and bool(outcome.missed)
    return outcomes


def _run(stage: Stage, limit: float, output: Path, more: str) -> Outcome:
    rows, report = output / "rows.jsonl", BUILD / f"{stage.name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    append_record(rows, {"stage": stage.name, "time": round(time.time(), 1)})
    known = len(read_records(rows))
    command = stage.command.format(output=output, rows=rows, report=report)
    if "--json" in command:
        command = f"{command} {more}"
    started = time.monotonic()
    with (output / "session.log").open("ab+", buffering=0) as log:
        log.write(f"\n=== {stage.name}: {command}\n".encode())
        said = log.tell()
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)], cwd=ROOT, stdout=log, stderr=log,
            process_group=0, env=_environment(),
        )  # fmt: skip
        try:
            code = process.wait(limit)
            status = OK if code == 0 else f"failed: exit status {code}"
        except subprocess.TimeoutExpired:
            status = "over its limit"
            process.send_signal(signal.SIGINT)  # it tells what it has found so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # all it started too: its group is its own
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may hold on to it
                process.wait(_LAST_WORDS_SECONDS)
        if status != OK:
            log.seek(max(said, log.seek(0, os.SEEK_END) - _LAST_WORDS))
            print(log.read().decode(errors="replace"), flush=True)
    if "{report}" in stage.command:
        append_record(rows, failures_row(stage.name, report))
    seconds = round(time.monotonic() - started, 1)
    return Outcome(name=stage.name, status=status, seconds=seconds, rows=read_records(rows)[known:])


def _environment() -> dict[str, str]:
    """The environment of a stage. Files that libraries leave behind go to ``build/``."""
    temporary = BUILD / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    modules = [str(BUILD / "gpu-site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(temporary),
        "TRITON_CACHE_DIR": str(BUILD / "triton-cache"),
        "TRITON_STORE_BINARY_ONLY": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(BUILD / "hypothesis"),
        "HF_HUB_OFFLINE": "1",
    }


def failures_row(name: str, report: Path) -> dict[str, Any]:
    """Failures of pytest's report; not run where none has passed or failed."""
    row: dict[str, Any] = {"name": f"{name}: failed", "unit": "tests", "bar": 0}
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return row | {"value": None, "ok": None}
    counts = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    print(f"{name}: {passed} passed, {failed} failed, {counts['skipped']} skipped", flush=True)
    if not passed + failed:
        return row | {"value": None, "ok": None}
    return row | {"value": failed, "ok": not failed}


def has_gpu() -> bool:
    """Raises SystemExit where torch cannot be imported: nothing can be run then."""
    asked = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 3)"
    code = subprocess.run([sys.executable, "-c", asked], check=False).returncode
    if code not in (0, 3):
        raise SystemExit(f"{sys.executable} has no torch that can be imported")
    return code == 0


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("call", choices=CALLS)
    arguments.add_argument("--output", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    arguments.add_argument("--stage", nargs="+", help="some of the call's; default: all")
    arguments.add_argument("--seconds", type=float, help="for all of it; default: all limits")
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="recorded rollouts to replay")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is ended first
    stages = CALLS[options.call]
    if options.stage:
        wanted = {"setup", *options.stage}
        if unknown := wanted - {stage.name for stage in stages}:
            arguments.error(f"--stage {' '.join(sorted(unknown))}: not of the {options.call} call")
        stages = tuple(stage for stage in stages if stage.name in wanted)
    if options.trace is not None:
        trace = f" --trace {shlex.quote(str(options.trace.resolve()))}"
        stages = tuple(
            replace(stage, command=stage.command + trace)
            if "bench_replay" in stage.command
            else stage
            for stage in stages
        )
    if not (on_gpu := has_gpu()):
        print("no GPU here: a rehearsal at the smallest size", flush=True)
    seconds = options.seconds or sum(stage.seconds for stage in stages)
    output = options.output.resolve()
    outcomes = run(stages, output, seconds, "" if on_gpu else "--quick")
    for each in outcomes:
        print(f"{each.name:14}{each.seconds:6.0f} s  {each.status:16}{len(each.missed)} missed")
    if any(each.status != OK for each in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
