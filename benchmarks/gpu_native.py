"""Compile the two extensions beside their packages, where a source tree has none that load.

For a machine from which nothing can be installed: it needs CMake, Ninja, a C++20 compiler and
nanobind with its backend. The GPU's own way needs neither extension; NGRAM and hybrid workers need
the corpus.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-native"
EXTENSIONS = {"ngram_native._ext": ROOT / "ngram_native", "rollout._cpu": ROOT / "rollout"}


def missing() -> list[str]:
    names = []
    for name in EXTENSIONS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}")
            names.append(name)
    return names


def main() -> None:
    if not missing():
        return
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    subprocess.run(configure, check=True)
    failed = [name for name, folder in EXTENSIONS.items() if not _built(name, folder)]
    if failed:
        raise SystemExit(f"not built: {', '.join(failed)}")


def _built(name: str, folder: Path) -> bool:
    """Each by itself: without the other one much can be run."""
    target = name.split(".")[1]
    build = ["cmake", "--build", str(BUILD), "--parallel", "--target", target]
    if subprocess.run(build, check=False).returncode:
        return False
    for built in BUILD.rglob(f"{target}*.so"):
        shutil.copy2(built, folder)
    # In a process of its own: this one has looked and remembers that there was none.
    load = [sys.executable, "-c", f"import {name}"]
    return not subprocess.run(load, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    main()
