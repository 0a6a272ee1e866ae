"""Memory of weights is freed and taken again in place."""

from __future__ import annotations

import torch

from rollout.models.layers.storage import (
    allocate_storage,
    empty_alone,
    free_storage,
    whole_segments,
)

CUDA, MIB = torch.device("cuda", 0), 1 << 20


def test_only_what_has_a_segment_of_its_own_takes_the_rest_of_it() -> None:
    for num_bytes, allocated in (
        (MIB + 1, MIB + 1), (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (256 * MIB, 256 * MIB)
    ):  # fmt: skip
        assert whole_segments(num_bytes, CUDA) == allocated
        assert whole_segments(num_bytes, torch.device("cpu")) == num_bytes


def test_memory_is_freed_and_taken_again() -> None:
    for shape in ((3, 2, 5), (0, 4), (7,)):
        tensor = empty_alone(shape, torch.bfloat16, torch.device("cpu"))
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert free_storage(tensor) == tensor.numel() * 2
        assert free_storage(tensor) == 0
        allocate_storage(tensor)
        assert torch.equal(tensor.fill_(3), torch.full(shape, 3, dtype=torch.bfloat16))
