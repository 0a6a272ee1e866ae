"""The kernels this processor would not choose by itself pass the same tests."""

from __future__ import annotations

import os
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
