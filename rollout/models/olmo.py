"""OLMo 2 (Walsh et al. 2024) and 3 (2025, with windows): norms after the halves of a
layer, and of the queries of all heads at once.

Legend: T query rows, H heads, E hidden, F features of all heads, D head dim or rotary dims, P
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollout.errors import InvalidInputError
from rollout.models.attention import Attention
from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.forward_context import LayerStates, StepAttention
from rollout.models.head_parts import HeadParts
from rollout.models.layers.experts import RouteRecorder
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.spec import ModelSpec
from rollout.ops.rms_norm import rms_norm
from rollout.parallel.partition import scaled


class OlmoAttention(Attention):
    """Attention that norms the queries of all heads as one vector, and the keys as another.

    Ranks that share the heads exchange them for it, so the bits are those of one rank.
    """

    def __init__(self, spec: ModelSpec, weights: WeightFactory, **options: Any) -> None:
        """Raises InvalidInputError if ranks would share a kv head."""
        super().__init__(spec, weights, **options)
        whole, group = spec.entire, self._group
        if whole.num_kv_heads % group.size:
            raise InvalidInputError(
                "parallel.size", group.size, f"must divide the {whole.num_kv_heads} kv heads"
            )
        heads = HeadParts.of(whole, group.size)
        self._query_features = scaled(heads.queries, spec.head_dim)
        self._key_features = scaled(heads.keys, spec.head_dim)
        self.q_norm_D = weights.tensor(whole.num_heads * spec.head_dim)
        self.k_norm_D = weights.tensor(whole.num_kv_heads * spec.head_dim)

    def normed(self, q_THD: torch.Tensor, k_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.q_norm_D is not None
        assert self.k_norm_D is not None
        return (
            self._normed(q_THD, self.q_norm_D, self._query_features),
            self._normed(k_TKD, self.k_norm_D, self._key_features),
        )

    def _normed(
        self, x_THD: torch.Tensor, norm_F: torch.Tensor, features: Sequence[range]
    ) -> torch.Tensor:
        x_TF = self._group.all_gather_columns(x_THD.flatten(1), features)
        own = features[self._group.rank]
        normed_TF = rms_norm(x_TF, norm_F, self.spec.rms_norm_eps)[:, own.start : own.stop]
        return normed_TF.unflatten(1, x_THD.shape[1:])


class OlmoLayer(DecoderLayer):
    """A decoder layer that norms what its halves add to the residual.

    ``input_norm_E`` belongs to the attention, as in other layers, but follows it.
    """

    attention_class = OlmoAttention

    @property
    def norms_before(self) -> tuple[None, None]:
        return None, None

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        mixed_TE = super().mix(hidden_TE, positions_T, cos_sin_PD, attention, states)
        return rms_norm(mixed_TE, self.input_norm_E, self.spec.rms_norm_eps)

    def feed_forward(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        fed_TE = super().feed_forward(hidden_TE, routes)
        return rms_norm(fed_TE, self.mlp_norm_E, self.spec.rms_norm_eps)

    def _norms(self) -> dict[str, torch.Tensor]:
        return {
            "post_attention_layernorm": self.input_norm_E,
            "post_feedforward_layernorm": self.mlp_norm_E,
        }


class Olmo(CausalLM):
    """An OLMo 2 or 3."""

    layer_class = OlmoLayer
