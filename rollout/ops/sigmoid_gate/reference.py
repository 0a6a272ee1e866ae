"""A sigmoid gate in plain torch."""

from __future__ import annotations

import torch


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.copy_(x.float() * gate.float().sigmoid())
