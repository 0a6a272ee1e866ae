"""Weights and KV ask for huge pages, keep their values, and are freed and taken again in place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rollout.memory.kv_pool import KvPool
from rollout.models.layers.packed_weight import PackedWeight
from rollout.models.layers.storage import (
    allocate_storage,
    empty_alone,
    free_storage,
    whole_segments,
)

CUDA, MIB = torch.device("cuda", 0), 1 << 20


def asks_for_huge_pages(address: int) -> bool:
    """Whether the kernel was told so for the mapping that holds ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("the address is not mapped")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux reports it")
def test_packed_weights_and_kv_ask_for_huge_pages() -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(1500, 1031)
    packed = PackedWeight.pack(weight_OI)
    if packed is None:
        pytest.skip("this processor packs nothing")
    middle = torch.ops.mkldnn.data_ptr(packed.opaque) + packed.num_bytes // 2
    assert asks_for_huge_pages(middle)
    assert torch.equal(packed.read(0, 1500), weight_OI)
    pool = KvPool(
        num_layers=1, num_slots=5000, num_kv_heads=2, head_dim=64,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    for _ in range(2):
        keys = pool.keys[0]
        assert asks_for_huge_pages(keys.data_ptr() + keys.nbytes // 2)
        pool.release()
        pool.allocate()


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
