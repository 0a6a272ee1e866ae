"""The least time a forward can take: bytes over bandwidth, or arithmetic over its rate.

Both rates are measured, by a copy and by products of squares, so that a time is judged by what the
device at hand can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from harness.shapes import Shape
from harness.timing import Call, wall_seconds

_BFLOAT16 = 2

_JUDGED = ("H100", "H200")
"""Parts of the names of devices that bars apply to."""

_LONG_SECONDS = 0.005
"""A product of this length is measured well; larger ones would only take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of a device, in units per second."""

    name: str
    bytes_per_second: float
    flop_per_second: float

    @staticmethod
    def of(device: torch.device) -> Ceilings:
        """The rates of this device, measured now."""
        return Ceilings(
            name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            bytes_per_second=_measure_copy(device),
            flop_per_second=_measure(device),
        )

    @property
    def judged(self) -> bool:
        """Whether bars apply to this device."""
        return any(part in self.name for part in _JUDGED)

    def floor_seconds(self, num_bytes: float, flop: float) -> float:
        return max(num_bytes / self.bytes_per_second, flop / self.flop_per_second)

    def forward_ms(self, shape: Shape, rows: int, sampled: int, kv_tokens: int) -> float:
        """Floor of ``rows`` query rows that read ``kv_tokens`` keys and values in each layer."""
        head = shape.vocab_size * shape.hidden_size
        body = shape.product_parameters - head
        weights = body + (head if sampled else 0)
        kv = shape.num_layers * shape.kv_numbers * kv_tokens
        flop = 2 * (rows * body + sampled * head)
        return 1e3 * self.floor_seconds(_BFLOAT16 * (weights + kv), flop)


def _measure_copy(device: torch.device) -> float:
    num_bytes = 1 << (31 if device.type == "cuda" else 28)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _measure(device: torch.device) -> float:
    """Squares grow until a product fills the device: small ones tell of a GPU's launches, and one
    of 2,048 rows takes a CPU without bf16 instructions many seconds. Such a CPU computes faster in
    float32, and may."""
    if device.type == "cpu":
        return max(_measure_in(dtype, device) for dtype in (torch.bfloat16, torch.float32))
    return _measure_in(torch.bfloat16, device)


def _measure_in(dtype: torch.dtype, device: torch.device) -> float:
    best = 0.0
    for size in (256, 512, 1024, 2048, 4096, 8192):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in "lr")
        seconds = _seconds(partial(torch.matmul, left, right), device)
        best = max(best, 2 * size**3 / seconds)
        if seconds > _LONG_SECONDS:
            break
    return best


def _seconds(call: Call, device: torch.device) -> float:
    """The best of a few, after one that warms up. A GPU's clock rises meanwhile."""
    attempts = 20 if device.type == "cuda" else 6
    timed = _cuda_seconds if device.type == "cuda" else wall_seconds
    return min([timed(call) for _ in range(attempts)][1:])


def _cuda_seconds(call: Call) -> float:
    """Seconds by the device's own clock: launching does not count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
