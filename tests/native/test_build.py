"""What the build ships: sanitized C++ tests that pass, and a stub that is true."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ngram_native

HERE = Path(__file__).resolve().parent
PACKAGE = Path(ngram_native.__file__).parent


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_cpp_tests_pass_under_sanitizers():
    cmake = shutil.which("cmake") or shutil.which("cmake", path=Path(sys.executable).parent)
    if cmake is None:
        pytest.skip("needs cmake")
    build = HERE.parents[1] / "build" / "native-tests"  # kept: the next run builds what changed
    for command in (
        [cmake, "-S", HERE, "-B", build],
        [cmake, "--build", build, "--parallel", "2"],
        [build / "ngram_tests"],
    ):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_stub_is_the_modules(tmp_path):
    made = tmp_path / "_ext.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "ngram_native._ext", "-o", made],
        check=True,
        cwd=PACKAGE.parent,
    )
    kept = (PACKAGE / "_ext.pyi").read_text()
    assert made.read_text() == kept.removeprefix("# ruff: noqa\n# fmt: off\n")
    assert (PACKAGE / "py.typed").exists()
