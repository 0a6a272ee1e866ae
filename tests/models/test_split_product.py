"""A product that ranks share has the bits of one rank."""

from __future__ import annotations

import pytest
import torch

from rollout.models.layers.linear import Linear
from rollout.models.layers.shard import split_product
from rollout.parallel import RankGroup
from rollout.parallel.partition import even_parts
from tests.helpers.thread_ranks import on_ranks

CPU = torch.device("cpu")


def packed(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
    outputs, inputs = weight_OI.shape
    linear = Linear(
        inputs, outputs, bias=bias_O is not None, dtype=weight_OI.dtype, device=CPU
    )  # fmt: skip
    linear.weight_rows(0, outputs).write(weight_OI)
    if bias_O is not None:
        linear.bias_rows(0, outputs).write(bias_O)
    linear.pack()
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "has_bias"),
    [(4, 33, 11, False), (17, 97, 130, True), (5, 576, 333, False), (33, 30, 1030, True)],
)
def test_any_number_of_ranks_has_the_bits_of_one(rows, inputs, outputs, has_bias, dtype):
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x_MI, weight_OI = random(rows, inputs), random(outputs, inputs)
    bias_O = random(outputs) if has_bias else None
    one = packed(weight_OI, bias_O)
    if not one.is_packed:
        pytest.skip("this processor's products are plain in this dtype")
    wanted_MO = one(x_MI)

    for size in (1, 2, 3, 4):
        of_inputs, of_outputs = even_parts(inputs, size), even_parts(outputs, size)

        def on_rank(group: RankGroup, of_inputs=of_inputs, of_outputs=of_outputs) -> torch.Tensor:
            read, own = of_inputs[group.rank], of_outputs[group.rank]
            bias = None if bias_O is None else bias_O[own.start : own.stop]
            linear = packed(weight_OI[own.start : own.stop], bias)
            part_MI = x_MI[:, read.start : read.stop]
            return split_product(linear, part_MI, group, of_inputs, of_outputs)

        for found_MO in on_ranks(size, on_rank):
            assert torch.equal(found_MO, wanted_MO), size
