"""Put the two extensions beside their packages, where a source tree has none that load.

For a machine from which nothing can be installed. They are taken from this project's wheel where
one was brought along; else they are compiled, for which it needs CMake, Ninja, a C++20 compiler and
nanobind with its backend. The GPU's own way needs neither extension; NGRAM and hybrid workers need
the corpus. One that is there and does not load is removed: with it the package could not be
imported, without it everything else can be run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-native"
EXTENSIONS = {
    "ngram_native._ext": ROOT / "ngram_native",
    "rollout.ops._cpu": ROOT / "rollout" / "ops",
}


def provide(wheels: Path) -> list[str]:
    """Provide both extensions; returns the names of those that are not to be had."""
    missing = []
    for name, folder in EXTENSIONS.items():
        if not loads(name):
            remove(name, folder)
            if not _brought(name, folder, wheels):
                missing.append(name)
    if not missing:
        return []
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    try:
        subprocess.run(configure, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"nothing is compiled: {error}", flush=True)
        return missing
    return [name for name in missing if not _built(name, EXTENSIONS[name])]


def loads(name: str) -> bool:
    """Whether it can be imported, asked in a new process: one remembers what it did not find."""
    load = [sys.executable, "-c", f"import {name}"]
    return not subprocess.run(load, cwd=ROOT, check=False).returncode


def remove(name: str, folder: Path) -> None:
    for broken in folder.glob(f"{name.rpartition('.')[2]}*.so"):
        print(f"{broken} does not load and is removed", flush=True)
        broken.unlink()


def _brought(name: str, folder: Path, wheels: Path) -> bool:
    prefix = name.replace(".", "/")
    for wheel in sorted(wheels.glob("specrollout-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.startswith(f"{prefix}.") and member.endswith(".so"):
                    (folder / Path(member).name).write_bytes(archive.read(member))
    return _loads_or_goes(name, folder)


def _built(name: str, folder: Path) -> bool:
    """Each by itself: without the other one much can be run."""
    target = name.rpartition(".")[2]
    build = ["cmake", "--build", str(BUILD), "--parallel", "--target", target]
    if subprocess.run(build, check=False).returncode:
        return False
    for built in BUILD.rglob(f"{target}*.so"):
        shutil.copy2(built, folder)
    return _loads_or_goes(name, folder)


def _loads_or_goes(name: str, folder: Path) -> bool:
    if not list(folder.glob(f"{name.rpartition('.')[2]}*.so")):
        return False
    if loads(name):
        return True
    remove(name, folder)
    return False
