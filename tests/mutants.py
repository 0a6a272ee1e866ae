"""Puts small faults into the sources, one at a time, and asks whether the tests notice.

    git clone . build/mutants && cd build/mutants && make install demo-model
    .venv/bin/python -m tests.mutants --count 150 --seed 1 [--tests tests/memory]

Changes files in place, so it wants a clone of its own. Tests run once under coverage; then each
mutant is given to the tests that run its line, the quickest first. Prints the survivors: some are
equivalent to the original, some change a speed alone, the others want a test.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "build" / "mutants.coverage"
GLOBS = (
    "rollout/engine/*.py", "rollout/scheduler/*.py", "rollout/memory/*.py",
    "rollout/sampling/*.py", "spec_workers/**/*.py", "ngram_native/*.py",
    "ngram_native/csrc/*.cpp", "ngram_native/csrc/*.h",
)  # fmt: skip
CORPUS = "ngram_native/corpus.py"  # calls the C++
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or",
    ast.Or: "and", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*",
}  # fmt: skip
CPP_SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&",
    "+": "-", "-": "+", "+=": "-=", "true": "false", "false": "true", "min": "max", "max": "min",
}  # fmt: skip
CPP_TOKEN = re.compile(r"(?<= )(<=?|>=?|[!=]=|&&|\|\||[-+]=?)(?= )|\b(true|false|min|max|\d+)\b")


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    before: str
    after: str
    text: str  # of the whole mutated file

    def __str__(self) -> str:
        place = f"{self.path.relative_to(ROOT)}:{self.line}"
        return f"{place}  {' '.join(self.before.split())}  ->  {self.after}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    text = path.read_text()
    edits = _python_edits(text) if path.suffix == ".py" else _cpp_edits(text)
    for start, end, after in edits:
        line = text.count("\n", 0, start) + 1
        yield Mutant(path, line, text[start:end], after, text[:start] + after + text[end:])


def _python_edits(text: str) -> Iterator[tuple[int, int, str]]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = text.encode()

    def at(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    def span(node: ast.stmt | ast.expr) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[tuple]:
        start, end = span(left)[1], span(right)[0]
        gap = re.search(r"[^\s()]+(\s+(not|in)\b)?", text[start:end])
        if gap and type(operator) in SWAPS:
            yield start + gap.start(), start + gap.end(), SWAPS[type(operator)]

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield *span(node.test), "False"
            if not isinstance(node, ast.While):
                yield *span(node.test), "True"
        elif isinstance(node, ast.Return) and node.value is not None:
            yield *span(node.value), "None"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield *span(node), str(node.value + 1 if type(node.value) is int else not node.value)
        elif isinstance(node, ast.AugAssign | ast.Delete | ast.Break | ast.Continue) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield *span(node), "pass"


def _cpp_edits(text: str) -> Iterator[tuple[int, int, str]]:
    start = 0
    for line in text.splitlines(keepends=True):
        if not re.match(r"\s*(#|//|static_assert|using|namespace|template)", line):
            for token in CPP_TOKEN.finditer(line.partition("//")[0]):
                after = CPP_SWAPS.get(token[0]) or str(int(token[0]) + 1)
                yield start + token.start(), start + token.end(), after
        start += len(line)


# As a pytest plugin: each test is a context of its own.


def pytest_runtest_logstart(nodeid: str) -> None:
    if measured := coverage.Coverage.current():
        measured.switch_context(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        with DATA.with_suffix(".seconds").open("a") as file:
            file.write(f"{report.duration}\t{report.nodeid}\n")


class Tests:
    """The tests that run a line, the quickest first."""

    def __init__(self, paths: list[str]) -> None:
        seconds = DATA.with_suffix(".seconds")
        if not DATA.exists():
            seconds.unlink(missing_ok=True)
            command = ["coverage", "run", f"--data-file={DATA}", "--source=rollout,spec_workers,"
                       "ngram_native", "-m", "pytest", "-p", "tests.mutants", *paths]  # fmt: skip
            subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False)
        lines = [line.partition("\t") for line in seconds.read_text().splitlines()]
        self.seconds = {nodeid: float(taken) for taken, _, nodeid in lines}
        self._data = coverage.CoverageData(str(DATA))
        self._data.read()

    def of(self, mutant: Mutant, budget: float) -> list[str]:
        native = mutant.path.suffix != ".py"
        path = ROOT / CORPUS if native else mutant.path
        by_line = self._data.contexts_by_lineno(str(path))
        found = set() if native else set(by_line.get(mutant.line, [])) - {""}
        if not found:  # run at import, or compiled: whatever runs the file
            found = {nodeid for ids in by_line.values() for nodeid in ids}
        chosen, spent = [], 0.0
        for nodeid in sorted(found & self.seconds.keys(), key=lambda each: self.seconds[each]):
            spent += self.seconds[nodeid]
            if chosen and spent > budget:
                break
            chosen.append(nodeid)
        return chosen


def is_caught(mutant: Mutant, tests: Tests, budget: float) -> str:
    """The reason, or an empty text."""
    chosen = tests.of(mutant, budget)
    if not chosen:
        return ""
    if mutant.path.suffix != ".py" and subprocess.run(["make", "install"], cwd=ROOT).returncode:
        return "it does not compile"
    limit = 60 + 5 * sum(tests.seconds[each] for each in chosen)
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "tests hang"
    return run.stdout.rpartition("FAILED ")[2].splitlines()[0] if run.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="of tests for each mutant")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    options = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet"], cwd=ROOT).returncode:
        parser.error("this clone has changes: make one for mutants alone")
    tests = Tests(options.tests)
    paths = sorted({path for pattern in GLOBS for path in ROOT.glob(pattern)})
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    survivors = []
    for mutant in random.Random(options.seed).sample(mutants, options.count):
        original, started = mutant.path.read_text(), time.monotonic()
        try:
            mutant.path.write_text(mutant.text)
            reason = is_caught(mutant, tests, options.seconds)
        finally:
            mutant.path.write_text(original)
        survivors += [] if reason else [mutant]
        print(f"{time.monotonic() - started:6.1f} s  {mutant}: {reason or 'SURVIVES'}", flush=True)
    print(f"{options.count - len(survivors)} of {options.count} caught; survivors:")
    print(*survivors, sep="\n")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
