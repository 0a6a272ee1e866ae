"""The least time a forward can take: bytes over bandwidth, or arithmetic over its rate."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from replay_bench.shapes import Shape

_BFLOAT16 = 2
_STATED = {"H200": (4.8e12, 990e12), "H100 80GB HBM3": (3.35e12, 990e12)}
"""By a part of the device's name: bytes and dense bf16 operations per second."""

_LONG_SECONDS = 0.005
"""A product of this length is measured well; larger ones would only take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Of a device, in units per second."""

    name: str
    bytes_per_second: float
    flop_per_second: float

    @staticmethod
    def of(device: torch.device) -> Ceilings:
        """Of an H200 and an H100 what their maker states; of any other GPU and of a CPU what was
        measured now, by a copy and by products of squares."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        for part, (num_bytes, flop) in _STATED.items():
            if part in name:
                return Ceilings(name=name, bytes_per_second=num_bytes, flop_per_second=flop)
        return Ceilings(
            name=name, bytes_per_second=_measure_copy(device), flop_per_second=_measure(device)
        )

    def forward_ms(self, shape: Shape, rows: int, sampled: int, kv_tokens: int) -> float:
        """Of ``rows`` query rows that read ``kv_tokens`` keys and values in each layer."""
        head = shape.vocab_size * shape.hidden_size
        body = shape.product_parameters - head
        weights = body + (head if sampled else 0)
        kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_tokens
        flop = 2 * (rows * body + sampled * head)
        moved = _BFLOAT16 * (weights + kv)
        return 1e3 * max(moved / self.bytes_per_second, flop / self.flop_per_second)


def _measure_copy(device: torch.device) -> float:
    source = torch.empty(
        1 << (31 if device.type == "cuda" else 28), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _measure(device: torch.device) -> float:
    """Squares grow until a product fills the device: small ones tell of a GPU's launches, and one
    of 2,048 rows takes a CPU without bf16 instructions many seconds. Such a CPU computes faster in
    float32, and may."""
    if device.type == "cpu":
        return max(_measure_in(dtype, device) for dtype in (torch.bfloat16, torch.float32))
    return _measure_in(torch.bfloat16, device)


def _measure_in(dtype: torch.dtype, device: torch.device) -> float:
    best = 0.0
    for rows in (256, 512, 1024, 2048, 4096, 8192):
        left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in "lr")
        seconds = _seconds(lambda left=left, right=right: left @ right, device)
        best = max(best, 2 * rows**3 / seconds)
        if seconds > _LONG_SECONDS:
            break
    return best


def _seconds(call, device: torch.device) -> float:  # type: ignore[no-untyped-def]
    """The best of a few, after one that warms up."""
    best = float("inf")
    for attempt in range(6):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt:
            best = min(best, time.perf_counter() - started)
    return best
