"""Kernels compiled for Hopper, which needs no GPU: their instructions, registers and memory.

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
from rollout.ops.latent_attention.triton import ROWS, _latent_attention_kernel  # noqa: E402
from rollout.ops.matmul.tiles import TWO_BLOCK_TILES, Tile, tiles  # noqa: E402
from rollout.ops.matmul.triton import _matmul_kernel  # noqa: E402
from rollout.ops.paged_attention.triton import (  # noqa: E402
    _attention_kernel,
    program_warps,
    resident_programs,
    tile_rows,
)
from tests.helpers.triton_compile import (  # noqa: E402
    MAX_REGISTERS,
    MAX_SHARED,
    Compiled,
    compile_for_hopper,
)

BFLOAT16 = {"x_ptr", "weight_ptr", "bias_ptr", "y_ptr", "q_ptr", "k_ptr", "v_ptr", "out_ptr"}
FLOAT32 = {"sums_ptr", "weights_ptr", "sinks_ptr", "log_decay_ptr", "beta_ptr", "states_ptr",
           "scale", "cap"}  # fmt: skip
ALIGNED = {"outputs", "features", "share", "head_dim", "rotary_dim", "latent_dim", "key_dim",
           "value_dim", "vocab"}  # fmt: skip


def compiled_for(
    kernel, constants: dict[str, object], *, num_warps: int, num_stages: int = 3
) -> Compiled:
    """Tensors are 16-bit where that is usual."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        pointer = "*" * name.endswith("_ptr")
        if name in FLOAT32:
            return f"{pointer}fp32"
        return "*bf16" if name in BFLOAT16 else "*i64" if name == "pairs_ptr" else f"{pointer}i32"

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
    [(False, False, 4, 128), (True, True, 4, 128), (True, True, 8, 64), (True, True, 2, 256)],
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


def test_latents_of_512_dims_fit_a_multiprocessor() -> None:
    constants = {
        "HAS_NODES": True, "ROWS": ROWS, "GROUP": 16, "ROTARY": 64, "LATENT": 512,
        "SPLIT": 8, "BLOCK": 64,
    }  # fmt: skip
    compiled = compiled_for(_latent_attention_kernel, constants, num_warps=8, num_stages=2)
    assert compiled.stack == 0
    assert 8 * 32 * compiled.registers <= MAX_REGISTERS
    assert compiled.shared + 1024 <= MAX_SHARED
    assert len(products(compiled)) == 1
