"""The kernels this processor would not choose by itself pass the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.ops.extension import cpu

FOLDER = Path(__file__).parent

OF_TRITON = {
    "test_interpreter.py",
    "test_kernel_variants.py",
    "test_recurrent_compiles.py",
    "test_triton_compiles.py",
}
"""They run no kernel of the processor's."""


@pytest.mark.parametrize("instruction_set", ["avx2", "generic"])
def test_other_instruction_sets(instruction_set: str) -> None:
    if "ROLLOUT_CPU_ISA" in os.environ:
        pytest.skip("this is the inner run")
    if instruction_set == "avx2" and cpu.instruction_set() == "generic":
        pytest.skip("not an x86-64-v3 processor")
    own = OF_TRITON | {Path(__file__).name}
    tests = [str(path) for path in FOLDER.glob("test_*.py") if path.name not in own]
    assert len(tests) > 10
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", *tests],
        env={**os.environ, "ROLLOUT_CPU_ISA": instruction_set},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]


def test_an_unknown_instruction_set_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import rollout._cpu as cpu; cpu.instruction_set()"],
        env={**os.environ, "ROLLOUT_CPU_ISA": "sse9"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ROLLOUT_CPU_ISA=sse9" in run.stderr
