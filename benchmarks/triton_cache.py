"""Triton's compiled kernels as one archive, to be compiled on one machine and used on the next.

Triton writes absolute paths into its cache, which are set right where it is unpacked. An archive of
another Triton, Python or processor is of no use, and is not unpacked.
"""

from __future__ import annotations

import io
import json
import platform
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

_ABOUT = "about.json"
_LIST = "__grp__"  # files that name the others of a kernel


def made_by() -> dict[str, str]:
    """The compilers and machine of kernels and launchers; the device is in Triton's keys."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        version = "none"
    python = f"{sys.implementation.cache_tag}"
    return {"triton": version, "python": python, "machine": platform.machine()}


def pack(cache: Path, archive: Path) -> str:
    """Pack all kernels. Returns a sentence about it."""
    kernels = sorted(folder for folder in cache.iterdir() if folder.is_dir())
    with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
        about = json.dumps(made_by()).encode()
        header = tarfile.TarInfo(_ABOUT)
        header.size = len(about)
        tar.addfile(header, io.BytesIO(about))
        for folder in kernels:
            tar.add(folder, folder.name)
    return f"{len(kernels)} compiled kernels in {archive}, {archive.stat().st_size >> 20} MiB"


def unpack(archive: Path, cache: Path) -> str:
    """Unpack into a cache that may hold others, if the archive is of use. Returns a sentence."""
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(dir=cache.parent) as aside,
            tarfile.open(archive, "r:gz") as tar,
        ):
            tar.extractall(aside, filter="data")
            folder = Path(aside)
            about = json.loads((folder / _ABOUT).read_text())
            if about != made_by():
                return f"{archive} is not used: it is of {about}, and this is {made_by()}"
            kernels = [each for each in folder.iterdir() if each.is_dir()]
            for kernel in kernels:
                _set_paths(kernel, cache / kernel.name)
            for kernel in kernels:
                if not (cache / kernel.name).exists():
                    kernel.rename(cache / kernel.name)
    except (OSError, EOFError, ValueError, LookupError, TypeError, tarfile.TarError) as error:
        return f"{archive} is not used: {type(error).__name__}: {error}"
    return f"{len(kernels)} compiled kernels from {archive}"


def _set_paths(kernel: Path, place: Path) -> None:
    for listed in kernel.glob(f"{_LIST}*"):
        group = json.loads(listed.read_text())
        paths = {name: str(place / name) for name in group["child_paths"]}
        listed.write_text(json.dumps({"child_paths": paths}))
