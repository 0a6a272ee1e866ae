"""Compile the two extensions beside their packages, where a source tree has none that load.

For a machine from which nothing can be installed: it needs CMake, Ninja, a C++20 compiler and
nanobind with its backend. The GPU's own way needs neither extension; NGRAM and hybrid workers need
the corpus. One that is there and does not load is removed: with it the package could not be
imported, without it everything else can be run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-native"
EXTENSIONS = {"ngram_native._ext": ROOT / "ngram_native", "rollout._cpu": ROOT / "rollout"}


def main() -> None:
    missing = [name for name in EXTENSIONS if not loads(name)]
    if not missing:
        return
    for name in missing:
        remove(name, EXTENSIONS[name])
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    subprocess.run(configure, check=True)
    failed = [name for name in missing if not _built(name, EXTENSIONS[name])]
    if failed:
        raise SystemExit(f"not built: {', '.join(failed)}")


def loads(name: str) -> bool:
    """In a process of its own: a process remembers what it did not find."""
    load = [sys.executable, "-c", f"import {name}"]
    return not subprocess.run(load, cwd=ROOT, check=False).returncode


def remove(name: str, folder: Path) -> None:
    for broken in folder.glob(f"{name.split('.')[1]}*.so"):
        print(f"{broken} does not load and is removed", flush=True)
        broken.unlink()


def _built(name: str, folder: Path) -> bool:
    """Each by itself: without the other one much can be run."""
    target = name.split(".")[1]
    build = ["cmake", "--build", str(BUILD), "--parallel", "--target", target]
    if subprocess.run(build, check=False).returncode:
        return False
    for built in BUILD.rglob(f"{target}*.so"):
        shutil.copy2(built, folder)
    if loads(name):
        return True
    remove(name, folder)
    return False


if __name__ == "__main__":
    main()
