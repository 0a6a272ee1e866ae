"""The kernels this processor would not choose by itself pass the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.ops.extension import cpu
from tests.helpers.child_tests import run_tests

OPS = Path(__file__).parents[1]
WITH_KERNELS = (
    "categorical", "gates", "glu", "head_matmul", "packed_matmul", "paged_attention", "panels",
    "recurrent_layers", "rms_norm", "rotary_store_kv",
)  # fmt: skip
"""Ops with a kernel for each instruction set."""
ONEDNN = "ONEDNN_MAX_CPU_ISA"
BEST_FIRST = ["amx", "avx512", "avx2", "generic"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("instruction_set", BEST_FIRST[1:])
def test_other_instruction_sets(instruction_set: str, tmp_path: Path) -> None:
    if "ROLLOUT_CPU_ISA" in os.environ:
        pytest.skip("this processor's own is chosen from outside")
    best = BEST_FIRST.index(cpu.instruction_set())
    if instruction_set not in BEST_FIRST[best + 1 :]:
        pytest.skip("this processor lacks it, or it is its own")
    paths = [str(OPS / f"test_{op}.py") for op in WITH_KERNELS]
    run_tests(paths, {"ROLLOUT_CPU_ISA": instruction_set}, tmp_path)


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
    [({}, {}, None), ({"ROLLOUT_CPU_ISA": "avx512"}, {}, "AVX512_CORE_FP16"),
     ({"ROLLOUT_CPU_ISA": "generic"}, {ONEDNN: "AVX2"}, "AVX2")],
)  # fmt: skip
def test_a_named_instruction_set_limits_onednn_too(wanted, given, found) -> None:
    env = {key: it for key, it in os.environ.items() if key not in ("ROLLOUT_CPU_ISA", ONEDNN)}
    code = f"import os, rollout; print(os.environ.get({ONEDNN!r}))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env | wanted | given, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == str(found)
