"""Rows of packed weights: the compiled op, the reference, and oneDNN's own reordering."""

from __future__ import annotations

import pytest
import torch

from rollout.models.layers.packed_weight import PackedWeight
from rollout.ops.panels import native, read_panels, reference, write_panels
from tests.helpers.packing import needs_no_tiles, packs

SIZES = [(1, 1), (5, 3), (64, 32), (65, 33), (100, 7), (130, 96), (200, 321)]


def random_bits(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaN among them: they are moved, never computed with."""
    wide = dtype.itemsize == 4
    bits = torch.int32 if wide else torch.int16
    limit = 2 ** (31 if wide else 15)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit, shape, generator=generator, dtype=bits).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def empty_panels(outputs: int, inputs: int, dtype: torch.dtype, lanes: int = 64) -> torch.Tensor:
    elements = 4 // dtype.itemsize
    units = -(-inputs // elements) + 3  # some to spare, as oneDNN leaves
    return random_bits(-(-outputs // lanes), units, lanes * elements, dtype=dtype, seed=99)


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_the_op_is_the_reference(outputs: int, inputs: int, lanes: int) -> None:
    dtype = torch.float32 if inputs in (3, 33, 96) else torch.bfloat16
    padded = random_bits(outputs, inputs + 5, dtype=dtype, seed=1)
    for offset in (0, 1):  # rows at odd addresses, of odd strides
        rows = padded[:, offset : offset + inputs]
        for first, last in ((0, outputs), (outputs // 3, outputs), (outputs // 2, outputs // 2)):
            panels = empty_panels(outputs, inputs, dtype, lanes)
            expected = panels.clone()
            assert native.supports(panels, rows)
            write_panels(panels, first, rows[first:last])
            reference.write_panels(expected, first, rows[first:last])
            assert torch.equal(bits(panels), bits(expected))
            found, wanted = (torch.zeros_like(padded)[:, offset : offset + inputs] for _ in "ab")
            read_panels(panels, first, found[first:last])
            reference.read_panels(panels, first, wanted[first:last])
            assert torch.equal(bits(found), bits(wanted))
            assert torch.equal(bits(found[first:last]), bits(rows[first:last]))


@needs_no_tiles
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_written_rows_are_those_onednn_packs(outputs: int, inputs: int, set_threads) -> None:
    set_threads(1 + outputs % 2)
    for dtype in (torch.float32, torch.bfloat16):
        before = torch.randn(outputs, inputs).to(dtype)
        after = torch.randn(outputs, inputs).to(dtype)
        packed = PackedWeight.pack(before)
        wanted = PackedWeight.pack(after)
        if packed is None or wanted is None:
            pytest.skip("this processor does not pack")
        # Processors without AVX-512 lay some shapes out otherwise.
        is_known = packed.panels_PUL is not None
        assert is_known or outputs == 1 or not packs(torch.bfloat16), "a layout not known here"
        half = outputs // 2
        packed.write(half, after[half:])
        packed.write(0, after[:half])
        if is_known:
            assert torch.equal(bits(packed.panels_PUL), bits(wanted.panels_PUL)), "padding included"
        assert torch.equal(packed.read(0, outputs), after)
        assert torch.equal(packed.opaque.to_dense(), after)
