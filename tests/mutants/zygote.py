"""Runs test files in children that find every heavy module imported, and nothing of the sources.

Started in the tree to be tested. Reads a JSON object per line, writes one per line:

    {"files": [...], "limits": [seconds of each], "log": path, "cover": [folder, ...]}
    {"code": pytest's exit code or None, "failed": test, "lines": {file: [...]},
     "seconds": ..., "cpu_seconds": ...}

A child that takes longer for a file than its limit is killed; its code is None, as is that of one
that dies.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

_HEAVY = (
    "torch", "numpy", "pytest", "hypothesis", "safetensors.torch", "tokenizers", "httpx", "fastapi",
    "uvicorn", "hydra", "omegaconf", "rich.console", "pyarrow.parquet", "prometheus_client",
    "psutil", "scipy", "coverage", "nanobind_backend",
)  # fmt: skip
_COLLECTION_SECONDS = 60.0
_PR_SET_CHILD_SUBREAPER = 36
Answer = dict[str, Any]


def main() -> None:
    # What a child's processes leave behind becomes ours, whatever session it is in.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in _HEAVY:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")


def _run(order: dict[str, Any]) -> Answer:
    started, cpu_before = time.monotonic(), _cpu_seconds()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_pytest(order, writing)
    os.close(writing)
    answer = _watch(reading, dict(zip(order["files"], order["limits"], strict=True)))
    os.close(reading)
    _kill_children()
    spent = {"seconds": time.monotonic() - started, "cpu_seconds": _cpu_seconds() - cpu_before}
    return answer | spent


def _cpu_seconds() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch(reading: int, limits: dict[str, float]) -> Answer:
    """The child's last word, or why there is none."""
    deadline = time.monotonic() + _COLLECTION_SECONDS + max(limits.values())
    buffered, current = b"", "collection"
    while time.monotonic() < deadline:
        _reap()
        if not select.select([reading], [], [], 0.2)[0]:
            continue
        part = os.read(reading, 1 << 16)
        if not part:
            return {"code": None, "failed": f"{current}: the process died"}
        *lines, buffered = (buffered + part).split(b"\n")
        for line in lines:
            word = json.loads(line)
            if "code" in word:
                return word
            current = word["file"]
            deadline = time.monotonic() + limits.get(current, _COLLECTION_SECONDS)
    return {"code": None, "failed": f"{current}: took too long"}


def _reap() -> None:
    """Tests wait until processes are gone whose parents died: those are ours, and nobody else's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill_children() -> None:
    """All processes below this one: tests start some."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _be_pytest(order: dict[str, Any], writing: int) -> None:
    """Does not return."""
    os.setsid()
    with open(order["log"], "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    import pytest

    # What is compiled of a mutant must not outlive it.
    sys.dont_write_bytecode = not order["cover"]

    def tell(**word: Any) -> None:
        os.write(writing, json.dumps(word).encode() + b"\n")

    watcher = _Watcher(tell)
    coverage = _start_coverage(order["cover"]) if order["cover"] else None
    arguments = ["-x", "-p", "no:cacheprovider", "--no-header", *order["files"]]
    code = int(pytest.main(arguments, plugins=[watcher]))
    lines: dict[str, list[int]] = {}
    if coverage is not None:
        coverage.stop()
        data = coverage.get_data()
        lines = {file: data.lines(file) or [] for file in data.measured_files()}
    sys.stdout.flush()
    _write_all(writing, {"code": code, "failed": watcher.failed, "lines": lines})
    os._exit(0)


def _write_all(writing: int, word: Answer) -> None:
    rest = memoryview(json.dumps(word).encode() + b"\n")
    while rest:
        rest = rest[os.write(writing, rest) :]


def _start_coverage(folders: list[str]) -> Any:
    from coverage import Coverage

    coverage = Coverage(
        data_file=None,
        config_file=False,
        include=[f"{folder}/*" for folder in folders],
        messages=False,
    )
    coverage.start()
    return coverage


class _Watcher:
    """Tells of each file as its first test begins, and keeps the first failure."""

    def __init__(self, tell: Any) -> None:
        self._tell = tell
        self._file = ""
        self.failed = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self._file:
            self._file = file
            self._tell(file=file)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid}: collection"


if __name__ == "__main__":
    main()
