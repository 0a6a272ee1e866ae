"""Make a bare GPU machine ready: packages, this project's extensions, compiled kernels.

    python3 benchmarks/gpu_setup.py --bundle build/gpu-bundle --site build/gpu-site

`make gpu-bundle` makes the bundle where there is a registry: wheels of packages and of this
project, whose extensions are unpacked beside their sources, and `kernels.tar.gz`. Packages go into
a folder of their own, which has to be on PYTHONPATH. The exit status is 1 where a module is missing
afterwards.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import triton_cache

ROOT = Path(__file__).resolve().parents[1]
MODULES = "torch, triton, transformers, scipy, pytest, hypothesis, rollout.ops._cpu, ngram_native"


def install(wheels: Path, site: Path) -> None:
    """Unpack wheels into ``site``; fetch nothing."""
    found = [str(each) for each in wheels.glob("*.whl") if not each.name.startswith("specrollout-")]
    if found:
        command = [
            sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade",
            "--no-compile", "--no-cache-dir", "--target", str(site), *found,
        ]  # fmt: skip
        subprocess.run(command, check=False)  # what is missing then is named by the import


def unpack_extensions(wheels: Path, root: Path = ROOT) -> None:
    for wheel in wheels.glob("specrollout-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".so"):
                    archive.extract(member, root)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--bundle", type=Path, default=Path("build/gpu-bundle"))
    arguments.add_argument("--site", type=Path, default=Path("build/gpu-site"))
    arguments.add_argument("--triton-cache", type=Path, default=Path("build/triton-cache"))
    options = arguments.parse_args()
    install(options.bundle / "wheels", options.site)
    unpack_extensions(options.bundle / "wheels")
    if (kernels := options.bundle / "kernels.tar.gz").exists():
        print(triton_cache.unpack(kernels, options.triton_cache), flush=True)
    path = os.pathsep.join([str(options.site.resolve()), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    tried = subprocess.run(
        [sys.executable, "-c", f"import {MODULES}"], cwd=ROOT, env=environment, check=False
    )
    raise SystemExit(1 if tried.returncode else 0)


if __name__ == "__main__":
    main()
