"""Gemma 2 (2024) and 3 (2025): norms before and after the halves of a layer, scaled embeddings, and
capped logits.

What else differs from Llama (windows, GELU, norms by 1 + weight, ropes) is in the ModelSpec.

Legend: T query rows, R sampled rows, E hidden, V vocabulary, D rotary dims, P positions.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.forward_context import LayerStates, StepAttention
from rollout.models.layers.experts import RouteRecorder
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.spec import ModelSpec
from rollout.ops.rms_norm import rms_norm
from rollout.ops.soft_cap import soft_cap_


class GemmaLayer(DecoderLayer):
    """A decoder layer with norms before and after its halves."""

    def __init__(self, spec: ModelSpec, weights: WeightFactory, **options: Any) -> None:
        super().__init__(spec, weights, **options)
        self.mixed_norm_E = weights.tensor(spec.hidden_size)
        self.fed_norm_E = weights.tensor(spec.hidden_size)

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        mixed_TE = super().mix(hidden_TE, positions_T, cos_sin_PD, attention, states)
        return rms_norm(mixed_TE, self.mixed_norm_E, self.spec.rms_norm_eps, unit_offset=True)

    def feed_forward(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        fed_TE = super().feed_forward(hidden_TE, routes)
        return rms_norm(fed_TE, self.fed_norm_E, self.spec.rms_norm_eps, unit_offset=True)

    def _norms(self) -> dict[str, torch.Tensor]:
        return {
            "input_layernorm": self.input_norm_E,
            "post_attention_layernorm": self.mixed_norm_E,
            "pre_feedforward_layernorm": self.mlp_norm_E,
            "post_feedforward_layernorm": self.fed_norm_E,
        }


class Gemma(CausalLM):
    """A Gemma 2 or 3: it scales its embeddings and may cap its logits."""

    layer_class = GemmaLayer

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        super().__init__(spec, weights)
        # Rounded, as in training.
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(self.dtype).item()

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids_T) * self._embedding_scale

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        logits_RV = super().logits(hidden_RE)
        if self.spec.logit_soft_cap is not None:
            soft_cap_(logits_RV, self.spec.logit_soft_cap)
        return logits_RV
