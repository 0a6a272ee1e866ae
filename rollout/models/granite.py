"""Granite 3 (IBM 2024) and the dense models of Granite 4: Llama with scaled embeddings, halves of
layers, and logits.

Legend: T query rows, R sampled rows, E hidden, V vocabulary, D rotary dims, P positions.
"""

from __future__ import annotations

import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.forward_context import LayerStates, StepAttention
from rollout.models.layers.experts import RouteRecorder
from rollout.models.layers.weight_loader import WeightLoader, fused_rows


class GraniteLayer(DecoderLayer):
    """A decoder layer that scales what its halves add to the residual."""

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        mixed_TE = super().mix(hidden_TE, positions_T, cos_sin_PD, attention, states)
        return mixed_TE * self.spec.residual_scale

    def feed_forward(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        return super().feed_forward(hidden_TE, routes) * self.spec.residual_scale


class Granite(CausalLM):
    """A Granite 3: it scales its embeddings and logits."""

    layer_class = GraniteLayer

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids_T) * self.spec.embedding_scale

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden_RE) / self.spec.logit_divisor


class SharedGranite(Granite):
    """A Granite 4, whose checkpoints name the MLP for the experts that it would have beside it."""

    def weight_loaders(self) -> dict[str, WeightLoader]:
        found = super().weight_loaders()
        for layer in range(self.spec.num_layers):
            at = f"model.layers.{layer}"
            names = [f"{at}.mlp.{part}_proj.weight" for part in ("gate", "up")]
            shared = f"{at}.shared_mlp"
            found[f"{shared}.input_linear.weight"] = fused_rows(
                {name: found[name] for name in names}
            )
            found[f"{shared}.output_linear.weight"] = found.pop(f"{at}.mlp.down_proj.weight")
        return found
