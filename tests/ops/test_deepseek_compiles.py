"""The kernels of DeepSeek's models, compiled for Hopper at their sizes: that needs no GPU."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from rollout.ops.latent_attention.triton import ROWS, _latent_attention_kernel
from rollout.ops.routing.triton import _route_kernel
from tests.helpers.triton_compile import MAX_REGISTERS, MAX_SHARED, compile_for_hopper


@pytest.mark.parametrize("has_nodes", [False, True])
def test_latents_of_512_dims_fit_a_multiprocessor(has_nodes: bool) -> None:
    constants = {
        "HAS_NODES": has_nodes, "ROWS": ROWS, "GROUP": 16, "ROTARY": 64, "LATENT": 512,
        "SPLIT": 8, "BLOCK": 64,
    }  # fmt: skip

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("q_ptr", "k_ptr", "out_ptr"):
            return "*bf16"
        if name.endswith("_ptr"):
            return "*fp32" if name in ("sums_ptr", "weights_ptr") else "*i32"
        return "fp32" if name == "scale" else "i32"

    compiled = compile_for_hopper(
        _latent_attention_kernel,
        [type_of(name) for name in _latent_attention_kernel.arg_names],
        constants,
        aligned=("rotary_dim", "latent_dim"),
        num_warps=8,
        num_stages=2,
    )
    assert compiled.stack == 0
    assert 8 * 32 * compiled.registers <= MAX_REGISTERS
    assert compiled.shared + 1024 <= MAX_SHARED
    assert len(set(re.findall(r"\b(?:wg)?mma\.\S*?(m\d+n\d+k\d+)", compiled.ptx))) == 1


@pytest.mark.parametrize(("groups", "size"), [(8, 32), (1, 512)])
def test_routing_needs_no_stack(groups: int, size: int) -> None:
    constants = {
        "CHOSEN": 8, "NORMALIZES": True, "SIGMOID": True, "HAS_BIAS": True,
        "HAS_GROUPS": groups > 1, "CHOSEN_GROUPS": 4, "GROUPS": groups, "SIZE": size, "RANKS": 8,
    }  # fmt: skip

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return "*i32" if name == "experts_ptr" else "*fp32"
        return "fp32" if name == "factor" else "i32"

    types = [type_of(name) for name in _route_kernel.arg_names]
    compiled = compile_for_hopper(_route_kernel, types, constants, num_warps=1)
    assert compiled.stack == 0
