"""DFlash (Chen, Liang, Liu 2026): a whole block of draft tokens in one forward.

Every layer's attention reads keys and values of two kinds: of the context, from hidden states of
the target that are fused once per token, and of the block itself, whose rows all see each other.
The block is the last known token and mask tokens behind it; a mask's row tells of the token at its
own position.

Legend: T query rows, R rows whose logits are computed, E hidden, F feature columns, D draft
vocabulary.
"""

from __future__ import annotations

import torch

from rollout.models.attention import Attention
from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.draft_model import DraftModel, DraftSpec, selected
from rollout.models.forward_context import StepAttention
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.rope import cos_sin_table
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.ops.rms_norm import add_rms_norm, rms_norm


class ContextAttention(Attention):
    """Attention that can store keys and values of rows that do not attend."""

    def store(
        self,
        index: int,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
    ) -> None:
        qkv_THD = self.qkv(hidden_TE).view(-1, sum(self.heads), self.spec.head_dim)
        q_THD, _, k_TKD, v_TKD = qkv_THD.split(self.heads, dim=1)
        q_THD, k_TKD = self.normed(q_THD, k_TKD)
        attention.store(index, q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD)


class DFlashLayer(DecoderLayer):
    """A decoder layer that also takes in the context."""

    attention_class = ContextAttention

    def store(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
    ) -> None:
        """Store the keys and values of context rows, from their fused features."""
        assert isinstance(self._attention, ContextAttention)
        self._attention.store(self.index, hidden_TE, positions_T, cos_sin_PD, attention)


class DFlash(DraftModel):
    """DFlash's network. `forward` takes in context; `draft` runs blocks."""

    def __init__(
        self,
        spec: DraftSpec,
        target: CausalLM,
        weights: WeightFactory,
        *,
        own_embedding: bool = False,
        own_head: bool = False,
        stored_ids_D: torch.Tensor | None = None,
    ) -> None:
        """``stored_ids_D``: see `DraftModel.name_tokens`."""
        super().__init__(spec, target, weights)
        self.name_tokens(stored_ids_D)
        hidden, decoder = spec.hidden_size, spec.decoder
        self.fc = weights.linear(spec.feature_size, hidden)
        self.hidden_norm_E = weights.tensor(hidden)
        self.layers = [
            DFlashLayer(decoder, weights, index=index, layer=index)
            for index in range(decoder.num_layers)
        ]
        self.final_norm_E = weights.tensor(hidden)
        self.head = weights.linear(hidden, spec.draft_vocab_size) if own_head else None
        self.embedding_VE = weights.tensor(decoder.vocab_size, hidden) if own_embedding else None
        self.cos_sin_PD = cos_sin_table(
            decoder.rope, decoder.rotary_dim, decoder.max_context_len, self.device
        )

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        return rms_norm(self.fc(features_TF), self.hidden_norm_E, self.spec.decoder.rms_norm_eps)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the context's keys and values in every layer, whatever the tokens are.

        Returns the fused features it was given.
        """
        for layer in self.layers:
            layer.store(hidden_TE, positions_T, self.cos_sin_PD, attention)
        return selected(hidden_TE, rows_R)

    def draft(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Hidden states [T, E] of the rows of blocks, for ``logits``."""
        eps = self.spec.decoder.rms_norm_eps
        residual_TE = self.embedded(self.embedding_VE, input_ids_T)
        for layer in self.layers:
            normed_TE = rms_norm(residual_TE, layer.input_norm_E, eps)
            mixed_TE = layer.attend(normed_TE, positions_T, self.cos_sin_PD, attention)
            normed_TE = add_rms_norm(mixed_TE, residual_TE, layer.mlp_norm_E, eps)
            residual_TE = residual_TE.add_(layer.feed_forward(normed_TE))
        return residual_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return super().logits(
            rms_norm(hidden_RE, self.final_norm_E, self.spec.decoder.rms_norm_eps)
        )

    def linears(self) -> list[Linear]:
        head = [] if self.head is None else [self.head]
        return [self.fc, *(each for layer in self.layers for each in layer.linears()), *head]

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders by the authors' names with the prefix ``draft.``."""
        found = linear_weight_loaders("draft", self.fc, {"fc": self.spec.hidden_size})
        for index, layer in enumerate(self.layers):
            found |= layer.weight_loaders(f"draft.layers.{index}")
        found |= {
            f"draft.{name}.weight": WeightLoader.of(table) for name, table in self._tables().items()
        }
        return found | self._head_loader()

    def _plain_weights(self) -> list[torch.Tensor]:
        layers = [each for layer in self.layers for each in layer.plain_weights()]
        return [*layers, *self._tables().values()]

    def _tables(self) -> dict[str, torch.Tensor]:
        """Tensors that belong neither to a linear layer nor to a decoder layer, by name."""
        found = {"hidden_norm": self.hidden_norm_E, "norm": self.final_norm_E}
        return found if self.embedding_VE is None else found | {"embed_tokens": self.embedding_VE}
