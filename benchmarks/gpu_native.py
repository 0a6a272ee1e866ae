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
EXTENSIONS = {"rollout._cpu": ROOT / "rollout", "ngram_native._ext": ROOT / "ngram_native"}


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
    subprocess.run(["cmake", "--build", str(BUILD), "--parallel"], check=True)
    for name, folder in EXTENSIONS.items():
        for built in BUILD.rglob(f"{name.split('.')[1]}*.so"):
            shutil.copy2(built, folder)
    # In a process of its own: this one has looked and remembers that there was none.
    load = "; ".join(f"import {name}" for name in EXTENSIONS)
    subprocess.run([sys.executable, "-c", load], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
