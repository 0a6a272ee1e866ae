"""The rotary tables of a model's layers."""

from __future__ import annotations

import torch

from rollout.models.layers.rope import cos_sin_table
from rollout.models.spec import ModelSpec


def rotary_tables(spec: ModelSpec, device: torch.device) -> list[torch.Tensor]:
    """Cosines and sines of each layer, [positions, rotary dims]; layers of one rope share them."""
    ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
    tables = {
        rope: torch.empty(spec.max_context_len, 0, device=device)
        if rope is None
        else cos_sin_table(rope, spec.rotary_dim, spec.max_context_len, device)
        for rope in set(ropes)
    }
    return [tables[rope] for rope in ropes]
