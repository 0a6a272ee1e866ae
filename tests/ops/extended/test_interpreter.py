"""Runs the ops that have Triton kernels interpreted, which is chosen before Triton is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.child_tests import run_tests

HERE = Path(__file__).parent
OPS = (
    "categorical", "draft_guesses", "experts", "gates", "glu", "latent_attention",
    "paged_attention", "recurrent_layers", "rms_norm", "rotary_store_kv", "tree_accept",
    "tree_growth", "truncation", "uniforms",
)  # fmt: skip
"""Ops whose tests are the same on the CPU and on a GPU; triton/ has what GPUs alone do."""


@pytest.mark.timeout(3600)
def test_triton_ops_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    paths = [str(HERE / "triton"), *(str(HERE.parent / f"test_{op}.py") for op in OPS)]
    run_tests(paths, {"TRITON_INTERPRET": "1"}, tmp_path)
