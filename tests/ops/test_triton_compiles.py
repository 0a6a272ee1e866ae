"""The kernels of matrix products, compiled for Hopper: that needs no GPU.

Exactness on a GPU rests on all tiles using one kind of tensor core instruction, 64 rows high and 16
features deep. Which instructions the compiler chooses can be read here.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from rollout.ops.grouped_matmul.triton import _grouped_matmul_kernel  # noqa: E402
from rollout.ops.matmul.tiles import TWO_BLOCK_TILES, Tile, tiles  # noqa: E402
from rollout.ops.matmul.triton import _matmul_kernel  # noqa: E402
from rollout.ops.paged_attention.triton import (  # noqa: E402
    RESIDENT,
    _attention_kernel,
    _fold_kernel,
    tile_rows,
)
from rollout.ops.truncation import triton as truncation  # noqa: E402
from tests.helpers.triton_compile import (  # noqa: E402
    MAX_REGISTERS,
    MAX_SHARED,
    Compiled,
    compile_for_hopper,
)

BF16 = ("x_ptr", "weight_ptr", "bias_ptr", "y_ptr", "q_ptr", "k_ptr", "v_ptr", "out_ptr")


def compiled_product(
    kernel, constants: dict[str, object], *, num_warps: int, num_stages: int
) -> Compiled:
    """16-bit inputs and aligned strides."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in BF16:
            return "*bf16"
        if name == "pairs_ptr":
            return "*i64"
        if name.endswith("_ptr"):
            return "*fp32" if name in ("sums_ptr", "weights_ptr", "sinks_ptr") else "*i32"
        return "fp32" if name in ("scale", "cap") else "i32"

    aligned = ("outputs", "features", "share", "head_dim")
    return compile_for_hopper(
        kernel,
        [type_of(name) for name in kernel.arg_names],
        constants,
        aligned=aligned,
        num_warps=num_warps,
        num_stages=num_stages,
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
        compiled = compiled_product(
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
        compiled = compiled_product(
            _grouped_matmul_kernel, constants, num_warps=tile.warps, num_stages=tile.stages
        )
        assert products(compiled) == {f"m64n{tile.rows}k16"}, tile
        assert_fits(tile, compiled)


@pytest.mark.parametrize(
    ("has_nodes", "is_varied", "group", "dim"),
    [(False, False, 4, 128), (True, False, 4, 128), (True, True, 4, 128), (True, True, 8, 64)],
)
def test_attention_uses_the_same_kind(has_nodes, is_varied, group, dim) -> None:
    """Two programs fit a multiprocessor, as lists of work take for granted."""
    constants = {
        "HAS_NODES": has_nodes, "HAS_WINDOW": is_varied, "HAS_CAP": is_varied,
        "HAS_SINKS": is_varied, "ROWS": tile_rows(torch.bfloat16, group), "GROUP": group,
        "DIM": dim, "SPLIT": 8, "BLOCK": 64,
    }  # fmt: skip
    compiled = compiled_product(_attention_kernel, constants, num_warps=4, num_stages=3)
    assert products(compiled) == {"m64n64k16", f"m64n{dim}k16"}
    assert RESIDENT * 4 * 32 * compiled.registers <= MAX_REGISTERS
    assert RESIDENT * (compiled.shared + 1024) <= MAX_SHARED


def test_parts_are_on_their_way_while_others_are_folded() -> None:
    constants = {"HAS_SINKS": True, "ROWS": 8, "GROUP": 4, "DIM": 128}
    compiled = compiled_product(_fold_kernel, constants, num_warps=4, num_stages=3)
    assert compiled.stack == 0
    assert compiled.shared >= 5 * 8 * 128 * 4
    assert 8 * (compiled.shared + 1024) <= MAX_SHARED


@pytest.mark.parametrize("name", ["tops", "bins", "gather", "threshold"])
def test_truncation_needs_no_stack(name: str) -> None:
    kernel = getattr(truncation, f"_{name}_kernel")
    block = 1024 if name == "threshold" else 4096
    constants = {"BLOCKS": 32, "BINS": 32, "BLOCK": block, "MAX_FOUND": 16384}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {"counts_ptr": "*i32", "top_k_ptr": "*i64"}
    compiled = compile_for_hopper(
        kernel,
        [
            "constexpr" if key in constants
            else types.get(key, "*fp32" if key.endswith("_ptr") else "i32")
            for key in kernel.arg_names
        ],
        constants, aligned=("stride", "vocab"), num_warps=8,
    )  # fmt: skip
    assert compiled.stack == 0
