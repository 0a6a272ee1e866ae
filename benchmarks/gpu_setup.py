"""Install the packages a bare machine lacks from wheels brought along; then the extensions.

    python benchmarks/gpu_setup.py --wheels build/gpu-wheels --site build/gpu-site

`make gpu-wheels` collects them where there is a registry. They are installed into a folder of
their own, which has to be on PYTHONPATH. What is still missing is told, with what it costs; the
exit status is 1 then.

Extensions are taken from this project's wheel where one was brought along; else they are compiled,
for which it needs CMake, Ninja, a C++20 compiler and nanobind with its backend. The GPU's own way
needs no extension; NGRAM and hybrid workers need the corpus. One that is there and does not
load is removed: with it the package could not be imported, without it everything else can be run.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu-native"
EXTENSIONS = {
    "ngram_native._ext": ROOT / "ngram_native",
    "rollout.ops._cpu": ROOT / "rollout" / "ops",
}


@dataclass(frozen=True, slots=True)
class Needed:
    distribution: str
    least: str  # version
    purpose: str


EVERYTHING, TESTS, CORPUS = "everything", "tests", "NGRAM: replay"
COMPILING = f"{CORPUS} (to compile it)"

NEEDED = (
    Needed("torch", "2.11", EVERYTHING),
    Needed("triton", "3.4", EVERYTHING),
    Needed("numpy", "2.0", EVERYTHING),
    Needed("safetensors", "0.5", EVERYTHING),
    Needed("transformers", "5.0", EVERYTHING),
    Needed("psutil", "5.9", EVERYTHING),
    Needed("msgspec", "0.19", EVERYTHING),
    Needed("filelock", "3.30", EVERYTHING),
    Needed("rich", "13.7", EVERYTHING),
    Needed("markdown-it-py", "2.2", EVERYTHING),  # of rich
    Needed("mdurl", "0.1", EVERYTHING),
    Needed("pygments", "2.13", EVERYTHING),
    Needed("pyyaml", "6", EVERYTHING),
    Needed("jinja2", "3.1", EVERYTHING),
    Needed("markupsafe", "2.0", EVERYTHING),  # of jinja2
    Needed("pytest", "8.3", TESTS),
    Needed("iniconfig", "1.1", TESTS),  # of pytest
    Needed("packaging", "22", TESTS),
    Needed("pluggy", "1.5", TESTS),
    Needed("pytest-timeout", "2.3", TESTS),
    Needed("pytest-xdist", "3.6", TESTS),
    Needed("execnet", "2.1", TESTS),  # of pytest-xdist
    Needed("hypothesis", "6.100", TESTS),
    Needed("sortedcontainers", "2.1", TESTS),  # of hypothesis
    Needed("scipy", "1.13", TESTS),
    Needed("nanobind-backend", "1.0", CORPUS),
    Needed("nanobind", "3.1", COMPILING),
    Needed("ninja", "1.10", COMPILING),
    Needed("cmake", "3.26", COMPILING),
)
"""Torch and what only comes with it travel in no wheels of a few MiB: `TOO_LARGE`."""

TOO_LARGE = ("torch", "triton", "numpy", "scipy", "transformers", "cmake")


def missing(needed: Sequence[Needed]) -> list[Needed]:
    importlib.invalidate_caches()
    return [each for each in needed if _version(each.distribution) < numbers(each.least)]


def _version(distribution: str) -> tuple[int, ...]:
    """The newest version on the path; empty where there is none."""
    found = metadata.Distribution.discover(name=distribution)
    return max((numbers(each.version) for each in found), default=())


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def install(lacking: Sequence[Needed], wheels: Path, site: Path) -> None:
    """Install packages one by one, so that one without a wheel costs no other; fetch nothing."""
    command = [
        sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--upgrade",
        "--no-cache-dir", "--disable-pip-version-check", "--find-links", str(wheels),
        "--target", str(site),
    ]  # fmt: skip
    for each in lacking:
        if list(wheels.glob(f"{each.distribution.replace('-', '_')}-*.whl")):
            subprocess.run([*command, f"{each.distribution}>={each.least}"], check=False)


def provide(wheels: Path) -> list[str]:
    """Provide all extensions; returns the names of those that are not to be had."""
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
    """Whether a module can be imported, in a new process: one remembers what it did not find."""
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
    """Compile one extension: much can be run without the others."""
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


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--wheels", type=Path, default=Path("build/gpu-wheels"))
    arguments.add_argument("--site", type=Path, default=Path("build/gpu-site"))
    arguments.add_argument("--collect", action="store_true", help="print what wheels to collect")
    options = arguments.parse_args(arguments_given)
    if options.collect:
        wanted = [each for each in NEEDED if each.distribution not in TOO_LARGE]
        print(*(f"{each.distribution}>={each.least}" for each in wanted))
        return
    if (lacking := missing(NEEDED)) and options.wheels.is_dir():
        install(lacking, options.wheels.resolve(), options.site)
        sys.path.insert(0, str(options.site.resolve()))
        lacking = missing(lacking)
    failed = provide(options.wheels)
    if not failed:
        lacking = [each for each in lacking if each.purpose != COMPILING]
    for each in lacking:
        print(f"missing: {each.distribution}>={each.least}, for {each.purpose}", flush=True)
    if lacking:
        print(f"`make gpu-wheels` collects what is small, to be brought along as {options.wheels}")
    if failed:
        print(f"extensions that are not there: {', '.join(failed)}", flush=True)
    if lacking or failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
