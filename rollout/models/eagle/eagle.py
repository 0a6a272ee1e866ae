"""EAGLE and EAGLE-2 (Li et al. 2024): one decoder layer over the target's last hidden state.

Legend: T query rows, R rows whose logits are computed, E hidden, V vocabulary, P positions.
"""

from __future__ import annotations

import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.draft_model import DraftModel, DraftSpec, selected
from rollout.models.forward_context import StepAttention
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.rope import cos_sin_table
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec
from rollout.ops.rms_norm import add_rms_norm


class EagleLayer(DecoderLayer):
    """A decoder layer without a norm before its attention."""

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        super().__init__(spec, weights)
        del self.input_norm_E

    @property
    def norms_before(self) -> tuple[None, torch.Tensor]:
        return None, self.mlp_norm_E

    def _norms(self) -> dict[str, torch.Tensor]:
        return {"post_attention_layernorm": self.mlp_norm_E}


class Eagle(DraftModel):
    """EAGLE's network, which extrapolates the input of the target's head.

    It reads the state after the final norm, and its output goes to the target's head unchanged.
    """

    def __init__(
        self,
        spec: DraftSpec,
        target: CausalLM,
        weights: WeightFactory,
        *,
        own_embedding: bool = False,
        fc_bias: bool = True,
    ) -> None:
        super().__init__(spec, target, weights)
        hidden, decoder = spec.hidden_size, spec.decoder
        self.fc = weights.linear(2 * hidden, hidden, bias=fc_bias)
        self.layer = EagleLayer(decoder, weights)
        self.embedding_VE = weights.tensor(decoder.vocab_size, hidden) if own_embedding else None
        self.cos_sin_PD = cos_sin_table(
            decoder.rope, decoder.rotary_dim, decoder.max_context_len, self.device
        )

    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layer, eps = self.layer, self.spec.decoder.rms_norm_eps
        embedded_TE = self.embedded(self.embedding_VE, input_ids_T)
        residual_TE = self.fc(torch.cat([embedded_TE, hidden_TE], dim=1))
        attended_TE = layer.attend(residual_TE, positions_T, self.cos_sin_PD, attention, rows_R)
        residual_TE = selected(residual_TE, rows_R)
        normed_TE = add_rms_norm(attended_TE, residual_TE, layer.mlp_norm_E, eps)
        return residual_TE.add_(layer.feed_forward(normed_TE))

    def linears(self) -> list[Linear]:
        return [self.fc, *self.layer.linears()]

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders by the authors' names with the prefix ``draft.``."""
        found = linear_weight_loaders("draft", self.fc, {"fc": self.spec.hidden_size})
        found |= self.layer.weight_loaders("draft.layers.0")
        if self.embedding_VE is not None:
            found["draft.embed_tokens.weight"] = WeightLoader.of(self.embedding_VE)
        return found

    def _plain_weights(self) -> list[torch.Tensor]:
        embedding = [] if self.embedding_VE is None else [self.embedding_VE]
        return [*self.layer.plain_weights(), *embedding]
