"""Compiles and runs the C++ part, which knows no Python."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = _ROOT / "benchmarks" / "native" / "insert.cpp"
_CORPUS = _ROOT / "ngram_native" / "csrc"
_OPTIONS = ["-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", "-pthread", f"-I{_CORPUS}"]


def compiler() -> str | None:
    """``$CXX`` or the first of the usual names that is there."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_program(compiler_path: str) -> Path:
    """The program beside the corpus's own sources, built anew when any of them changed.

    Raises:
        subprocess.CalledProcessError: It does not compile; the compiler has said why.
    """
    sources = [_PROGRAM, *sorted(_CORPUS.glob("*.cpp"))]
    sources = [source for source in sources if source.name != "binding.cpp"]
    digest = hashlib.sha256(" ".join([compiler_path, *_OPTIONS]).encode())
    for path in [*sources, *sorted(_CORPUS.glob("*.h"))]:
        digest.update(path.read_bytes())
    program = _ROOT / "build" / "benchmarks" / f"insert-{digest.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(f".{os.getpid()}")
        command = [compiler_path, *_OPTIONS, *map(str, sources), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.replace(program)
    return program


def run_program(
    program: Path, script: Path, *, max_bytes: int, budget: int, repetitions: int
) -> list[tuple[int, float]]:
    """Tokens and CPU seconds of each repetition."""
    command = [str(program), str(script), str(max_bytes), str(budget), str(repetitions)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [(int(n), float(s)) for n, s in map(str.split, output.splitlines())]
