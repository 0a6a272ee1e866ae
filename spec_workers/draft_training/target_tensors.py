"""A target's weights, read where the model has them.

Legend: E hidden, D draft vocabulary.
"""

from __future__ import annotations

import torch

from rollout.models.causal_lm import CausalLM


class TargetTensors:
    """By the checkpoint's names, as float32 copies on the CPU."""

    def __init__(self, model: CausalLM) -> None:
        self._destinations = model.destinations()

    def read(self, name: str) -> torch.Tensor:
        return self._destinations[name].read().float().cpu()

    def of_layer(self, layer: int, name: str) -> torch.Tensor:
        return self.read(f"model.layers.{layer}.{name}.weight")

    def head_rows(self, token_ids_D: torch.Tensor) -> torch.Tensor:
        """[D, E]"""
        return self.read("lm_head.weight")[token_ids_D.cpu()]
