"""Question: is all of this right on a GPU, and how fast? One lent for half an hour answers here.

    python3 benchmarks/gpu_session.py --output FOLDER --seconds 540 --stage smoke step profile
    python3 benchmarks/gpu_merge.py FOLDER... --json session.json

Each stage is a process of its own with a limit; one that fails or hangs costs no other. A stage for
which too little is left of --seconds is not begun, and one may be cut short by it; their names are
printed, for the next call. `setup` comes first in each call, and costs nothing where nothing is
missing. Nothing is written but the folder, `build/` and the extensions beside their packages.

The folder has at most 8 files of at most 16 MiB: rows.jsonl, each row as it comes, between marks of
the stages; session.log, all that was printed; traces of a few steps; triton-cache.tar.gz, what was
compiled, for the next call's --triton-cache. A call into the same folder adds to it.

The exit status is 0 where every stage that was asked for went well, and 1 where not. Bars that were
missed do not count.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import triton_cache
from gpu_stages import SETUP, Stage, stages
from harness.rows import append_record, read_records

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-session"
SITE = ROOT / "build" / "gpu-site"
TRITON_CACHE = ROOT / "build" / "triton-cache"

ROWS, LOG, CACHE = "rows.jsonl", "session.log", "triton-cache.tar.gz"
MAX_FILES, MAX_BYTES = 8, 16 << 20

_MIN_SHARE = 0.5
"""Share of a stage's limit that has to be left to begin it: most end well before theirs."""

_LAST_WORDS_SECONDS = 10.0
_LAST_WORDS = 1500
"""Characters of a failed stage's output that are printed too."""

_PRCTL = ctypes.CDLL(None).prctl
_PARENT_DEATH_SIGNAL = 1
_CLOSING_SECONDS = 15.0
"""To pack what was compiled."""

OK, NOT_BEGUN, CUT_SHORT, SKIPPED = "ok", "not begun", "cut short", "skipped"


@dataclass(slots=True, kw_only=True)
class Outcome:
    name: str
    status: str  # "ok", "failed: ...", "over its limit", "cut short", "not begun", "skipped: ..."
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def run(
    chosen: Sequence[Stage],
    output: Path,
    seconds: float,
    *,
    floors: Path | None = None,
    on_gpu: bool = True,
) -> list[Outcome]:
    """Run what fits, in order. ``floors``: rows with the device's rates, besides those found."""
    output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    with (output / LOG).open("ab", buffering=0) as log:
        for stage in chosen:
            left = deadline - time.monotonic()
            if stage.needs_gpu and not on_gpu:
                outcome = Outcome(name=stage.name, status=f"{SKIPPED}: it needs a GPU")
            elif left < _MIN_SHARE * stage.seconds:
                outcome = Outcome(name=stage.name, status=NOT_BEGUN)
            else:
                print(f"{stage.name} ...", flush=True)
                outcome = _run(stage, left - _LAST_WORDS_SECONDS, output, log, floors)
            _mark(output, stage.name, outcome.status, outcome.seconds)
            tell(outcome)
            outcomes.append(outcome)
    return outcomes


def _mark(output: Path, name: str, status: str, seconds: float = 0.0) -> None:
    mark = {"stage": name, "status": status, "seconds": seconds, "time": round(time.time(), 1)}
    append_record(output / ROWS, mark)


def _run(stage: Stage, left: float, output: Path, log: BinaryIO, floors: Path | None) -> Outcome:
    log.write(f"\n=== {stage.name}\n".encode())
    said = log.tell()
    rows = output / ROWS
    _mark(output, stage.name, "begun")
    known = len(read_records(rows))
    started = time.monotonic()
    report = BUILD / f"{stage.name}.xml"
    report.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, *_command(stage, output, report, floors)],
        cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        process_group=0, preexec_fn=_follow_parent, env=_environment(),
    )  # fmt: skip
    status = 0
    try:
        status = process.wait(min(left, stage.seconds))
        result = OK if status == 0 else f"failed: exit status {status}"
    except subprocess.TimeoutExpired:
        result = "over its limit" if stage.seconds <= left else CUT_SHORT
        _interrupt(process)
    finally:
        with suppress(ProcessLookupError):  # all it started too: its group is its own
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may hold on to it
            process.wait(_LAST_WORDS_SECONDS)
    if stage.tests:
        append_record(rows, failures_row(stage.name, report))
    if status != 0:  # where one was cut short is no news
        with (output / LOG).open("rb") as written:
            written.seek(max(said, written.seek(0, os.SEEK_END) - _LAST_WORDS))
            print(written.read().decode(errors="replace"), flush=True)
    return Outcome(
        name=stage.name,
        status=result,
        seconds=round(time.monotonic() - started, 1),
        rows=read_records(rows)[known:],
    )


def _command(stage: Stage, output: Path, report: Path, floors: Path | None) -> list[str]:
    command = list(stage.command)
    if stage.rows:
        command += ["--json", str(output / ROWS)]
    if stage.floors:
        command += ["--floors", str(output / ROWS if floors is None else floors)]
    if stage.traces:
        command += ["--traces", str(output)]
    if stage.tests:
        command += [f"--junitxml={report}"]
    return command


def _environment() -> dict[str, str]:
    """The environment of a stage. Files that libraries leave behind go to ``build/``."""
    temporary = BUILD / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    modules = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    # An environment's own tools, also where it was not activated: the system's CMake may be old.
    programs = [str(SITE / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "PATH": os.pathsep.join(filter(None, programs)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(temporary),
        "TRITON_CACHE_DIR": str(TRITON_CACHE),
        "TRITON_STORE_BINARY_ONLY": "1",
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "torch_extensions"),
        "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "inductor"),
        "CUDA_CACHE_PATH": str(BUILD / "cuda"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(BUILD / "hypothesis"),
        "HF_HOME": str(BUILD / "huggingface"),
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


def _follow_parent() -> None:
    """Have this process killed with its parent, and let it heed interrupts, which a shell ignores
    for background jobs. A terminal session of its own might outlive whoever ends the parent's.
    """
    _PRCTL(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the process, which then tells the rows or failures it has found so far."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WORDS_SECONDS)


def has_gpu() -> bool:
    """Raises SystemExit where torch cannot be imported: nothing can be run then."""
    asked = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 3)"
    asking = subprocess.run(
        [sys.executable, "-c", asked], cwd=ROOT, env=_environment(), check=False
    )
    if asking.returncode not in (0, 3):
        raise SystemExit(f"{sys.executable} has no torch that can be imported")
    return asking.returncode == 0


def trim(log: Path, max_bytes: int = MAX_BYTES) -> None:
    """Cut the middle out of a log that is too long."""
    if log.stat().st_size > max_bytes:
        text, part = log.read_bytes(), max_bytes // 2 - 100
        left_out = f"\n... {len(text) - 2 * part} bytes are left out ...\n".encode()
        log.write_bytes(text[:part] + left_out + text[-part:])


def tell(outcome: Outcome) -> None:
    """Print the bars of a stage and whether they were met."""
    for row in outcome.rows:
        if row.get("bar") is not None:
            met = {True: "ok", False: "MISSED", None: "not run"}[row["ok"]]
            print(f"  {met:8}{row['name']}: {row['value']} {row['unit']}, bar {row['bar']}")
    print(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)


def summarize(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        rows = sum("name" in row for row in outcome.rows)
        missed = sum(row.get("ok") is False for row in outcome.rows)
        counted = f"{rows} rows, {missed} missed" if rows else ""
        print(f"{outcome.name:18} {outcome.seconds:6.0f} s  {outcome.status:24} {counted}")
    if left := [each.name for each in outcomes if each.status in (NOT_BEGUN, CUT_SHORT)]:
        print("not begun or cut short: --stage", *left)


def _there(path: Path | None, otherwise: str) -> Path | None:
    """A file that was forgotten costs no session."""
    if path is None or path.is_file():
        return path and path.resolve()
    print(f"{path} is not there: {otherwise}", flush=True)
    return None


def main(arguments_given: Sequence[str] | None = None) -> None:
    started = time.monotonic()
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--output", type=Path, default=Path("runs/gpu"), metavar="FOLDER")
    arguments.add_argument("--seconds", type=float, default=1700.0, help="for all of it")
    arguments.add_argument(
        "--trace", type=Path, action="append", default=[], metavar="FILE",
        help="recorded rollouts, for the replays",
    )  # fmt: skip
    arguments.add_argument("--floors", type=Path, metavar="FILE", help="another call's rows.jsonl")
    arguments.add_argument("--triton-cache", type=Path, metavar="ARCHIVE", help="another call's")
    arguments.add_argument("--wheels", type=Path, default=Path("build/gpu-wheels"))
    names = [stage.name for stage in stages()]
    arguments.add_argument("--stage", nargs="+", choices=names, help="default: all")
    options = arguments.parse_args(arguments_given)
    floors = _there(options.floors, "floors are measured anew")
    recorded = [_there(path, "a made-up trace may be replayed") for path in options.trace]
    output, wheels = options.output.resolve(), options.wheels.resolve()
    if options.triton_cache is not None:
        print(triton_cache.unpack(options.triton_cache, TRITON_CACHE), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is ended first
    if not (on_gpu := has_gpu()):
        print("no GPU here: what needs none runs at a small size", flush=True)
    listed = stages([path for path in recorded if path], wheels, on_gpu=on_gpu)
    wanted = set(options.stage or names) | {SETUP}
    chosen = [stage for stage in listed if stage.name in wanted]
    left = options.seconds - _CLOSING_SECONDS - (time.monotonic() - started)
    outcomes = run(chosen, output, left, floors=floors, on_gpu=on_gpu)
    trim(output / LOG)
    print(triton_cache.pack(TRITON_CACHE, output / CACHE, MAX_BYTES), flush=True)
    summarize(outcomes)
    if any(outcome.status != OK for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
