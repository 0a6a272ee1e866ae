"""Weights and KV ask for huge pages, and keep their values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rollout.memory.kv_pool import KvPool
from rollout.models.layers.packed_weight import PackedWeight


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
