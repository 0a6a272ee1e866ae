"""The build's products: sanitized C++ tests, fuzzed and from many threads, and a true stub."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ngram_native

NATIVE = Path(__file__).resolve().parents[1]
PACKAGE = Path(ngram_native.__file__).parent


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs():
    """The folder of the sanitized programs; kept, so that the next run builds what changed."""
    # The environment's own first, as `make fuzz` does: another one builds everything again.
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    if cmake is None or not shutil.which("c++"):
        pytest.skip("needs cmake and a C++ compiler")
    build = NATIVE.parents[1] / "build" / "native-tests"
    run(cmake, "-S", NATIVE, "-B", build)
    run(cmake, "--build", build, "--parallel", "2")
    return build


def test_cpp_tests_pass_under_sanitizers(programs):
    run(programs / "ngram_tests")


@pytest.mark.parametrize(("target", "inputs"), [("fuzz_calls", 500), ("fuzz_load", 2000)])
def test_fuzzing_finds_nothing(programs, tmp_path, target, inputs):
    """About as many inputs as still reach code that none before them did; `make fuzz` runs more."""
    limits = ("--inputs", str(inputs), "--seed", "1", "--failing", tmp_path / "failing")
    assert f" {inputs} inputs in " in run(programs / target, *limits)


def test_threads_race_nowhere(programs):
    command = [programs / "stress", "--rounds", "40"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not start under this kernel's address layout")
    assert done.returncode == 0, done.stdout + done.stderr


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
