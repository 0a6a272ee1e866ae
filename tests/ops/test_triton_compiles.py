"""Kernels compiled for Hopper, which needs no GPU: their instructions, registers and memory.

Exactness on a GPU rests on all tiles using one kind of tensor core instruction, 64 rows high and 16
features deep. Which instructions the compiler chooses can be read here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from rollout.ops.causal_conv.triton import _causal_conv_kernel  # noqa: E402
from rollout.ops.gated_delta_rule.triton import _gated_delta_rule_kernel  # noqa: E402
from rollout.ops.gates.triton import (  # noqa: E402
    _delta_gates_kernel,
    _gated_rms_norm_kernel,
    _sigmoid_gate_kernel,
)
from rollout.ops.grouped_matmul.triton import _grouped_matmul_kernel  # noqa: E402
from rollout.ops.latent_attention.triton import ROWS, _latent_attention_kernel  # noqa: E402
from rollout.ops.matmul.tiles import TWO_BLOCK_TILES, Tile, tiles  # noqa: E402
from rollout.ops.matmul.triton import _matmul_kernel  # noqa: E402
from rollout.ops.paged_attention.triton import (  # noqa: E402
    _attention_kernel,
    _fold_kernel,
    program_warps,
    resident_programs,
    tile_rows,
)
from rollout.ops.rms_norm.triton import _add_rms_norm_kernel, _rms_norm_kernel  # noqa: E402
from rollout.ops.routing.triton import _route_kernel  # noqa: E402
from rollout.ops.truncation import triton as truncation  # noqa: E402
from tests.helpers.triton_compile import (  # noqa: E402
    MAX_REGISTERS,
    MAX_SHARED,
    Compiled,
    compile_for_hopper,
)

BFLOAT16 = {"x_ptr", "weight_ptr", "bias_ptr", "y_ptr", "q_ptr", "k_ptr", "v_ptr", "out_ptr",
            "a_ptr", "b_ptr", "gate_ptr", "residual_ptr", "states_ptr"}  # fmt: skip
FLOAT32 = {"sums_ptr", "weights_ptr", "sinks_ptr", "log_decay_ptr", "beta_ptr", "A_log_ptr",
           "dt_bias_ptr", "scale", "cap", "eps", "factor"}  # fmt: skip
INT64 = {"pairs_ptr", "top_k_ptr"}
ALIGNED = {"outputs", "features", "share", "head_dim", "rotary_dim", "latent_dim", "key_dim",
           "value_dim", "channels", "width", "vocab"}  # fmt: skip


def compiled_for(
    kernel,
    constants: dict[str, object],
    *,
    num_warps: int,
    num_stages: int = 3,
    float32: Collection[str] = (),
) -> Compiled:
    """Tensors are 16-bit where that is usual, but for those named in ``float32``."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        pointer = "*" * name.endswith("_ptr")
        if name in float32 or name in FLOAT32:
            return f"{pointer}fp32"
        return "*bf16" if name in BFLOAT16 else "*i64" if name in INT64 else f"{pointer}i32"

    types = [type_of(name) for name in kernel.arg_names]
    return compile_for_hopper(
        kernel, types, constants, aligned=ALIGNED, num_warps=num_warps, num_stages=num_stages
    )


def products(compiled: Compiled) -> set[str]:
    """Kinds of tensor core instructions."""
    return set(re.findall(r"\b(?:wg)?mma\.\S*?(m\d+n\d+k\d+)", compiled.ptx))


def test_all_matmul_tiles_use_one_kind_of_product() -> None:
    """Each tile with features that fill its last step or with some that do not, in turn; the walk
    along the features is that of grouped products, which take each tile the other way."""
    for index, tile in enumerate(tiles(torch.bfloat16)):
        even = index % 2 == 0
        constants = {
            "HAS_BIAS": not even, "EVEN": even, "ROWS": tile.rows, "MORE_ROWS": tile.more_rows,
            "OUTPUTS": tile.outputs, "FEATURES": tile.features, "GROUP": 8,
        }  # fmt: skip
        compiled = compiled_for(
            _matmul_kernel, constants, num_warps=tile.warps, num_stages=tile.stages
        )
        blocks = {tile.rows, tile.more_rows} - {0}
        assert products(compiled) == {f"m64n{block}k16" for block in blocks}, tile
        assert_fits(tile, compiled)


def assert_fits(tile: Tile, compiled: Compiled) -> None:
    """A tile's programs fit a multiprocessor at once, and its features are loaded while others are
    multiplied."""
    assert compiled.stack == 0, tile
    assert tile.programs * tile.warps * 32 * compiled.registers <= MAX_REGISTERS, tile
    assert tile.programs * (compiled.shared + 1024) <= MAX_SHARED, tile
    assert "cp.async.cg.shared.global" in compiled.ptx, tile
    stage = 2 * tile.features * (tile.height + tile.outputs)
    assert compiled.shared >= tile.stages * stage, tile


def test_grouped_products_use_the_same_kind() -> None:
    for index, tile in enumerate(set(tiles(torch.bfloat16)) - TWO_BLOCK_TILES):
        constants = {
            "EVEN": index % 2 == 1, "EXPERTS": 128, "ROWS": tile.rows, "OUTPUTS": tile.outputs,
            "FEATURES": tile.features,
        }  # fmt: skip
        compiled = compiled_for(
            _grouped_matmul_kernel, constants, num_warps=tile.warps, num_stages=tile.stages
        )
        assert products(compiled) == {f"m64n{tile.rows}k16"}, tile
        assert_fits(tile, compiled)


@pytest.mark.parametrize(
    ("has_nodes", "is_varied", "group", "dim"),
    [
        (False, False, 4, 128),
        (True, False, 4, 128),
        (True, True, 4, 128),
        (True, True, 8, 64),
        (True, True, 2, 256),
    ],
)
def test_attention_uses_the_same_kind(has_nodes, is_varied, group, dim) -> None:
    """As many programs of the attention kernel fit a multiprocessor as `resident_programs` says,
    and their tensor core instructions do not depend on the variant."""
    constants = {
        "HAS_NODES": has_nodes, "HAS_WINDOW": is_varied, "HAS_CAP": is_varied,
        "HAS_SINKS": is_varied, "ROWS": tile_rows(torch.bfloat16, group), "GROUP": group,
        "DIM": dim, "SPLIT": 8, "BLOCK": 64,
    }  # fmt: skip
    warps, programs = program_warps(dim), resident_programs(dim)
    compiled = compiled_for(_attention_kernel, constants, num_warps=warps, num_stages=3)
    groups = warps // 4  # of warps that share a product's columns
    assert products(compiled) == {f"m64n{64 // groups}k16", f"m64n{dim // groups}k16"}
    assert programs * warps * 32 * compiled.registers <= MAX_REGISTERS
    assert programs * (compiled.shared + 1024) <= MAX_SHARED
    assert compiled.stack < 1024, "what registers do not hold"


def test_parts_are_on_their_way_while_others_are_folded() -> None:
    constants = {"HAS_SINKS": True, "ROWS": 8, "GROUP": 4, "DIM": 128}
    compiled = compiled_for(_fold_kernel, constants, num_warps=4, num_stages=3)
    assert compiled.stack == 0
    assert compiled.shared >= 5 * 8 * 128 * 4
    assert 8 * (compiled.shared + 1024) <= MAX_SHARED


@pytest.mark.parametrize("has_nodes", [False, True])
def test_latents_of_512_dims_fit_a_multiprocessor(has_nodes: bool) -> None:
    constants = {
        "HAS_NODES": has_nodes, "ROWS": ROWS, "GROUP": 16, "ROTARY": 64, "LATENT": 512,
        "SPLIT": 8, "BLOCK": 64,
    }  # fmt: skip
    compiled = compiled_for(_latent_attention_kernel, constants, num_warps=8, num_stages=2)
    assert compiled.stack == 0
    assert 8 * 32 * compiled.registers <= MAX_REGISTERS
    assert compiled.shared + 1024 <= MAX_SHARED
    assert len(products(compiled)) == 1


@pytest.mark.parametrize("name", ["tops", "bins", "gather", "threshold"])
def test_truncation_needs_no_stack(name: str) -> None:
    kernel = truncation.tops_kernel if name == "tops" else getattr(truncation, f"_{name}_kernel")
    block = 1024 if name == "threshold" else 4096
    constants = {"BLOCKS": 32, "BINS": 32, "BLOCK": block, "MAX_FOUND": 16384}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    floats = {"logits_ptr", "tops_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "found_ptr",
              "out_ptr"}  # fmt: skip
    assert compiled_for(kernel, constants, num_warps=8, float32=floats).stack == 0


@pytest.mark.parametrize(("groups", "size"), [(8, 32), (1, 512)])
def test_routing_needs_no_stack(groups: int, size: int) -> None:
    constants = {
        "CHOSEN": 8, "NORMALIZES": True, "SIGMOID": True, "HAS_BIAS": True,
        "HAS_GROUPS": groups > 1, "CHOSEN_GROUPS": 4, "GROUPS": groups, "SIZE": size, "RANKS": 8,
    }  # fmt: skip
    floats = {"logits_ptr", "bias_ptr"}
    assert compiled_for(_route_kernel, constants, num_warps=1, float32=floats).stack == 0


@pytest.mark.parametrize("key_dim", [64, 128, 256])
def test_the_delta_rule_keeps_its_states_in_registers(key_dim: int) -> None:
    constants = {"EPSILON": 1e-6, "KEYS": key_dim, "COLUMNS": 8}
    ptx = compiled_for(
        _gated_delta_rule_kernel, constants, num_warps=1, float32=("states_ptr",)
    ).ptx
    assert "shfl.sync" in ptx
    assert "fma.rn.f32" not in ptx  # every product rounds, whatever is added to it
    assert ".local" not in ptx


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *((_causal_conv_kernel, {"HAS_BIAS": has_bias, "TAPS": taps, "BLOCK": 512})
          for has_bias in (True, False) for taps in (1, 4)),
        (_delta_gates_kernel, {"BLOCK": 32}),
        (_gated_rms_norm_kernel, {"BLOCK": 128}),
        (_sigmoid_gate_kernel, {"BLOCK": 256}),
        (_rms_norm_kernel, {"UNIT_OFFSET": True, "BLOCK": 2048}),
        (_add_rms_norm_kernel, {"UNIT_OFFSET": True, "BLOCK": 2048}),
    ],
)  # fmt: skip
def test_row_kernels_compile(kernel, constants: dict[str, object]) -> None:
    num_warps = 4 if kernel is _causal_conv_kernel else 1
    assert ".entry" in compiled_for(kernel, constants, num_warps=num_warps).ptx
