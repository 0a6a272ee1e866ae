"""The kernels this processor would not choose by itself pass the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.ops.extension import cpu
from tests.helpers.child_tests import run_tests

FOLDER = Path(__file__).parent

ONEDNN = "ONEDNN_MAX_CPU_ISA"

BEST_FIRST = ["amx", "avx512", "avx2", "generic"]

NOT_OF_THEM = {
    "test_interpreter.py", "test_kernel_variants.py", "test_matmul_tiles.py", "test_stub.py",
    "test_triton_compiles.py", Path(__file__).name,
}  # fmt: skip
"""They run no kernel that there is for each instruction set."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "generic"])
def test_other_instruction_sets(instruction_set: str, tmp_path: Path) -> None:
    if "ROLLOUT_CPU_ISA" in os.environ:
        pytest.skip("this processor's own is chosen from outside")
    best = BEST_FIRST.index(cpu.instruction_set())
    if instruction_set not in BEST_FIRST[best + 1 :]:
        pytest.skip("this processor lacks it, or it is its own")
    tests = [str(path) for path in FOLDER.glob("test_*.py") if path.name not in NOT_OF_THEM]
    assert len(tests) > 10
    run_tests(tests, {"ROLLOUT_CPU_ISA": instruction_set}, tmp_path)


def test_an_unknown_instruction_set_is_refused() -> None:
    """By the extension itself, without the package around it."""
    run = subprocess.run(
        [sys.executable, "-c", "import _cpu; _cpu.instruction_set()"],
        env={**os.environ, "ROLLOUT_CPU_ISA": "sse9"},
        cwd=Path(cpu.__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ROLLOUT_CPU_ISA=sse9" in run.stderr


@pytest.mark.parametrize(
    ("wanted", "given", "found"),
    [(None, None, None), ("avx512", None, "AVX512_CORE_FP16"), ("generic", "AVX2", "AVX2")],
)
def test_a_named_instruction_set_limits_onednn_too(
    wanted: str | None, given: str | None, found: str | None
) -> None:
    env = {key: it for key, it in os.environ.items() if key not in ("ROLLOUT_CPU_ISA", ONEDNN)}
    env |= {"ROLLOUT_CPU_ISA": wanted} if wanted else {}
    env |= {ONEDNN: given} if given else {}
    code = f"import os, rollout; print(os.environ.get({ONEDNN!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(found)
