"""The kernels of recurrent layers, compiled for Hopper: that needs no GPU."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from rollout.ops.causal_conv.triton import _causal_conv_kernel
from rollout.ops.gated_delta_rule.triton import _gated_delta_rule_kernel
from rollout.ops.gates.triton import (
    _delta_gates_kernel,
    _gated_rms_norm_kernel,
    _sigmoid_gate_kernel,
)
from rollout.ops.rms_norm.triton import _add_rms_norm_kernel, _rms_norm_kernel
from tests.helpers.triton_compile import compile_for_hopper

INT32 = ("q_offsets_ptr", "sources_ptr", "parents_ptr", "targets_ptr")
FLOAT32 = ("log_decay_ptr", "beta_ptr", "A_log_ptr", "dt_bias_ptr")
ALIGNED = ("key_dim", "value_dim", "channels", "width")


def ptx_of(kernel, constants: dict[str, object], num_warps: int, float32: tuple[str, ...] = ()):
    """With bfloat16 tensors, but for those named."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in INT32:
            return "*i32"
        if name.endswith("_ptr"):
            return "*fp32" if name in FLOAT32 + float32 else "*bf16"
        return "fp32" if name in ("eps", "scale") else "i32"

    types = [type_of(name) for name in kernel.arg_names]
    compiled = compile_for_hopper(kernel, types, constants, aligned=ALIGNED, num_warps=num_warps)
    return compiled.ptx


@pytest.mark.parametrize("key_dim", [64, 128, 256])
def test_the_delta_rule_keeps_its_states_in_registers(key_dim: int) -> None:
    ptx = ptx_of(
        _gated_delta_rule_kernel,
        {"EPSILON": 1e-6, "KEYS": key_dim, "COLUMNS": 8},
        num_warps=1,
        float32=("states_ptr",),
    )
    assert "shfl.sync" in ptx
    assert "fma.rn.f32" not in ptx  # every product rounds, whatever is added to it
    assert ".local" not in ptx


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_compiles(taps: int, has_bias: bool) -> None:
    constants = {"HAS_BIAS": has_bias, "TAPS": taps, "BLOCK": 512}
    ptx = ptx_of(_causal_conv_kernel, constants, num_warps=4)
    assert ".entry" in ptx


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (_delta_gates_kernel, {"BLOCK": 32}),
        (_gated_rms_norm_kernel, {"BLOCK": 128}),
        (_sigmoid_gate_kernel, {"BLOCK": 256}),
        (_rms_norm_kernel, {"UNIT_OFFSET": True, "BLOCK": 2048}),
        (_add_rms_norm_kernel, {"UNIT_OFFSET": True, "BLOCK": 2048}),
    ],
)
def test_row_kernels_compile(kernel, constants: dict[str, object]) -> None:
    assert ".entry" in ptx_of(kernel, constants, num_warps=1)
