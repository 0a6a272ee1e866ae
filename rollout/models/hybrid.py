"""Hybrid targets: gated delta rule layers between full-attention layers.

Qwen3-Next (Qwen 2025) and Qwen3.5 (Qwen 2026) differ only in their ModelSpec.

Legend: T query rows, E hidden, D rotary dims, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rollout.models.causal_lm import LayerAttention, LayerStates
from rollout.models.decoder_layer import Layer
from rollout.models.gated_delta_net import GatedDeltaNet
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader, with_alias
from rollout.models.llama import Llama, LlamaLayer, ModelLayer
from rollout.models.spec import ModelSpec


class DeltaLayer(Layer):
    """A recurrent layer with a norm before its mixer: a `ModelLayer`."""

    def __init__(self, spec: ModelSpec, weights: WeightFactory, *, index: int, layer: int) -> None:
        """``index``: among the recurrent layers. ``layer``: among all layers."""
        self._delta_net = GatedDeltaNet(spec, weights)
        super().__init__(spec, weights, self._delta_net, "linear_attn", layer=layer)
        self.index = index
        self.input_norm_E = weights.tensor(spec.hidden_size)

    @property
    def norms_before(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.input_norm_E, self.mlp_norm_E

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: LayerAttention,
        states: LayerStates | None,
    ) -> torch.Tensor:
        assert states is not None
        return self._delta_net(self.index, hidden_TE, states)

    def _norms(self) -> dict[str, torch.Tensor]:
        return {"input_layernorm": self.input_norm_E, **super()._norms()}


class Hybrid(Llama):
    """A `CausalLM`. Weights are uninitialised until written through ``weight_loaders``."""

    def _make_layers(self, weights: WeightFactory) -> Sequence[ModelLayer]:
        linear = self.spec.linear_attention
        recurrent, attending = () if linear is None else linear.layers, self.spec.attention_layers
        layers: list[ModelLayer] = []
        for layer in range(self.spec.num_layers):
            is_recurrent = layer in recurrent
            kind = DeltaLayer if is_recurrent else LlamaLayer
            index = (recurrent if is_recurrent else attending).index(layer)
            layers.append(kind(self.spec, weights, index=index, layer=layer))
        return layers

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders under every prefix of ``spec.decoder_names``; the first is the config's own."""
        prefixes = self.spec.decoder_names
        plain = super().weight_loaders()
        if prefixes == ("model",):
            return plain
        found: dict[str, WeightLoader] = {}
        for name, loader in plain.items():
            own, *others = _spellings(name, prefixes)
            if loader.alias_of is not None or loader.parts:
                canonical = loader.alias_of and _spellings(loader.alias_of, prefixes)[0]
                parts = tuple(_spellings(part, prefixes)[0] for part in loader.parts)
                loader = replace(loader, alias_of=canonical, parts=parts)
            found[own] = loader
            for other in others:
                found |= with_alias(own, other, loader)
        return found


def _spellings(name: str, prefixes: tuple[str, ...]) -> list[str]:
    """A tensor's names with each of these decoder prefixes instead of ``model``."""
    if not name.startswith("model."):
        return [name]
    return [f"{prefix}.{name.removeprefix('model.')}" for prefix in prefixes]
