"""The lines that each test file runs, and its seconds."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutation import Mutation
from tests.mutants.workbench import ROOT, Workbench

_LONGEST_SECONDS = 1800.0  # of a test file, under coverage
_FRAMEWORKS = "tests/frameworks/"  # have environments of their own
_CORPUS = "ngram_native/corpus.py"
"""The file that calls the compiled corpus: C++ has no map of its own."""


@dataclass(frozen=True, slots=True)
class TestFile:
    path: str
    seconds: float
    cpu_seconds: float
    lines: dict[str, set[int]]  # by source file


class CoverageMap:
    def __init__(self, files: Sequence[TestFile]) -> None:
        self.files = files
        tree = ast.parse((ROOT / _CORPUS).read_text())
        self._corpus_lines = {
            statement.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for statement in node.body
        }

    def covering(self, mutation: Mutation) -> list[TestFile]:
        """Test files that run the mutated statement, the quickest first."""
        first, last = mutation.edit.statement
        wanted = self._corpus_lines if mutation.is_native else set(range(first, last + 1))
        file = _CORPUS if mutation.is_native else mutation.file
        found = [each for each in self.files if each.lines.get(file, set()) & wanted]
        return sorted(found, key=lambda each: each.cpu_seconds)


def coverage_map(bench: Workbench, tests: Sequence[str], file: Path) -> CoverageMap:
    """The one in ``file``, if it is of these sources and tests; else measured and written there.

    Test files that fail, or that skip everything, are left out.
    """
    paths = _test_files(tests)
    fingerprint = _fingerprint(paths)
    if file.exists() and (known := json.loads(file.read_text()))["fingerprint"] == fingerprint:
        measured = known["files"]
    else:
        measured = [_measured(bench, path) for path in paths]
        if all(each["code"] != 0 for each in measured):
            raise RuntimeError("no test file passes: map.log has the last one's output")
        file.write_text(json.dumps({"fingerprint": fingerprint, "files": measured}))
    return CoverageMap([
        TestFile(
            each["path"],
            each["seconds"],
            each["cpu_seconds"],
            {name: set(lines) for name, lines in each["lines"].items()},
        )
        for each in measured
        if each["code"] == 0
    ])  # fmt: skip


def _measured(bench: Workbench, path: str) -> dict:
    answer = bench.run([path], [_LONGEST_SECONDS], log="map.log", covers=True)
    seconds, cpu_seconds, code = (answer[name] for name in ("seconds", "cpu_seconds", "code"))
    print(f"{seconds:7.1f} s, {cpu_seconds:6.1f} s of a core, exit {code}: {path}", flush=True)
    lines = {
        Path(name).relative_to(bench.tree).as_posix(): numbers
        for name, numbers in answer.get("lines", {}).items()
    }
    return {
        "path": path,
        "code": code,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "lines": lines,
    }


def _test_files(tests: Sequence[str]) -> list[str]:
    found = []
    for name in tests:
        path = ROOT / name
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [file.relative_to(ROOT).as_posix() for file in files]
    return [name for name in found if not name.startswith(_FRAMEWORKS)]


def _fingerprint(paths: Sequence[str]) -> str:
    """A digest of the sources, the tests and the names of the test files that are run."""
    digest = hashlib.sha256(json.dumps(list(paths)).encode())
    for folder in ("rollout", "spec_workers", "ngram_native", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "mutants" not in path.parts and "soak" not in path.parts:
                digest.update(path.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
