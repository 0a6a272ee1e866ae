"""A target's weights, read where the model has them.

Legend: E hidden, D draft vocabulary.
"""

from __future__ import annotations

import torch

from rollout.models.causal_lm import CausalLM


class TargetTensors:
    """By the checkpoint's names, as float32 copies on the CPU."""

    def __init__(self, model: CausalLM) -> None:
        self._spec = model.spec
        self._destinations = model.weight_loaders()

    def read(self, name: str) -> torch.Tensor:
        return self._destinations[name].read().float().cpu()

    def norm(self, name: str) -> torch.Tensor:
        """The factors of a norm."""
        weight_E = self.read(f"model.{name}.weight")
        return weight_E + 1 if self._spec.norm_unit_offset else weight_E

    def of_layer(self, layer: int, name: str) -> torch.Tensor | None:
        """None where the layer has none: experts are no MLP."""
        found = f"model.layers.{layer}.{name}.weight"
        return self.read(found) if found in self._destinations else None

    def queries(self, layer: int) -> torch.Tensor | None:
        """The layer's query projection, without the gates that may be beside each head."""
        weight_QE = self.of_layer(layer, "self_attn.q_proj")
        if weight_QE is None or not self._spec.gated_attention:
            return weight_QE
        by_head = weight_QE.unflatten(0, (self._spec.num_heads, 2, -1))
        return by_head[:, 0].flatten(0, 1)

    def head_rows(self, token_ids_D: torch.Tensor) -> torch.Tensor:
        """[D, E]"""
        return self.read("lm_head.weight")[token_ids_D.cpu()]
