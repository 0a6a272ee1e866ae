"""EAGLE-3 (Li et al. 2025): one decoder layer over three hidden states of the target, fused.

Legend: T query rows, R rows whose logits are computed, E hidden, F feature columns, D draft
vocabulary, V the target's vocabulary, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.errors import CheckpointError
from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.draft_model import DraftModel, DraftSpec, selected
from rollout.models.forward_context import StepAttention
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.rope import cos_sin_table
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec
from rollout.ops.rms_norm import add_rms_norm, rms_norm


def target_token_ids(
    d2t_D: torch.Tensor, t2d_V: torch.Tensor | None, draft_vocab_size: int, vocab_size: int
) -> torch.Tensor:
    """The target's token of each draft token, int64 [D], in the checkpoint's order.

    EAGLE's authors, SpecForge and speculators store ``d2t`` as the difference to the draft token.
    ``t2d`` marks the target's tokens that the draft has; it reveals a ``d2t`` that stores the
    tokens themselves.

    Raises CheckpointError if the tables are not a vocabulary of D distinct tokens.
    """
    if tuple(d2t_D.shape) != (draft_vocab_size,):
        raise CheckpointError(
            f"d2t is {list(d2t_D.shape)}, the draft has {draft_vocab_size} tokens"
        )
    stored_D = d2t_D.long()
    added_D = stored_D + torch.arange(draft_vocab_size)
    if t2d_V is None or draft_vocab_size == vocab_size:
        if _is_vocabulary(added_D, vocab_size):
            return added_D
        raise CheckpointError(
            f"d2t, added to the draft's tokens, does not give {draft_vocab_size} distinct ones of "
            f"the target's {vocab_size}"
        )
    marked = t2d_V.nonzero().flatten()
    for tokens_D in (added_D, stored_D):
        if _is_vocabulary(tokens_D, vocab_size) and torch.equal(tokens_D.sort().values, marked):
            return tokens_D
    raise CheckpointError(
        f"d2t and t2d disagree: t2d marks {len(marked)} of the target's tokens, which d2t gives "
        "neither as differences nor as tokens"
    )


def _is_vocabulary(tokens_D: torch.Tensor, vocab_size: int) -> bool:
    in_range = bool(((tokens_D >= 0) & (tokens_D < vocab_size)).all())
    return in_range and len(tokens_D.unique()) == len(tokens_D)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Options:
    """The options in which checkpoints of the same DraftSpec differ."""

    own_embedding: bool = False  # else the target's
    own_head: bool = True  # else the target's
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm over all feature columns
    norm_each_feature: bool = False  # EAGLE-3.1: a norm for each layer's features
    norm_before_residual: bool = False  # the residual is the normed hidden state
    norm_output: bool = False  # EAGLE-3.1: the next step reads the input of the head


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads the normed embedding and hidden state, 2E columns.

    ``input_norm_E`` is the embedding's.
    """

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        super().__init__(spec, weights, attention_inputs=2 * spec.hidden_size)
        self.hidden_norm_E = weights.tensor(spec.hidden_size)

    def _norms(self) -> dict[str, torch.Tensor]:
        return {"hidden_norm": self.hidden_norm_E, **super()._norms()}


class Eagle3(DraftModel):
    """EAGLE-3's network.

    A head whose tokens do not ascend in its checkpoint is stored in ascending order, and read and
    written in the checkpoint's.
    """

    def __init__(
        self,
        spec: DraftSpec,
        target: CausalLM,
        weights: WeightFactory,
        *,
        options: Eagle3Options,
        stored_ids_D: torch.Tensor | None = None,
    ) -> None:
        """``stored_ids_D``: see `DraftModel.name_tokens`."""
        super().__init__(spec, target, weights)
        self.options = options
        self.name_tokens(stored_ids_D)
        hidden, decoder = spec.hidden_size, spec.decoder
        each = range(spec.features.count if options.norm_each_feature else 0)
        self.feature_norms = [weights.tensor(spec.target_hidden_size) for _ in each]
        self.feature_norm_F = weights.tensor(spec.feature_size) if options.norm_before_fc else None
        self.fc = weights.linear(spec.feature_size, hidden, bias=options.fc_bias)
        self.layer = Eagle3Layer(decoder, weights)
        self.final_norm_E = weights.tensor(hidden)
        self.head = weights.linear(hidden, spec.draft_vocab_size) if options.own_head else None
        self.embedding_VE: torch.Tensor | None = None
        if options.own_embedding:
            self.embedding_VE = weights.tensor(decoder.vocab_size, hidden)
        self.cos_sin_PD = cos_sin_table(
            decoder.rope, decoder.rotary_dim, decoder.max_context_len, self.device
        )

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        eps = self.spec.decoder.rms_norm_eps
        if self.feature_norm_F is not None:
            features_TF = rms_norm(features_TF, self.feature_norm_F, eps)
        if self.feature_norms:
            layers = features_TF.split(self.spec.target_hidden_size, dim=1)
            pairs = zip(layers, self.feature_norms, strict=True)
            features_TF = torch.cat([rms_norm(layer, norm, eps) for layer, norm in pairs], dim=1)
        return self.fc(features_TF)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream after the layer, normed only with ``norm_output``."""
        layer, eps = self.layer, self.spec.decoder.rms_norm_eps
        normed_TE = rms_norm(hidden_TE, layer.hidden_norm_E, eps)
        embedded_TE = self.embedded(self.embedding_VE, input_ids_T)
        embedded_TE = rms_norm(embedded_TE, layer.input_norm_E, eps)
        joined_T2E = torch.cat([embedded_TE, normed_TE], dim=1)
        residual_TE = selected(
            normed_TE if self.options.norm_before_residual else hidden_TE, rows_R
        )
        if residual_TE is hidden_TE:
            residual_TE = hidden_TE.clone()  # it is written to

        attended_TE = layer.attend(joined_T2E, positions_T, self.cos_sin_PD, attention, rows_R)
        normed_TE = add_rms_norm(attended_TE, residual_TE, layer.mlp_norm_E, eps)
        hidden_TE = residual_TE.add_(layer.feed_forward(normed_TE))
        return (
            rms_norm(hidden_TE, self.final_norm_E, eps) if self.options.norm_output else hidden_TE
        )

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        if not self.options.norm_output:
            hidden_RE = rms_norm(hidden_RE, self.final_norm_E, self.spec.decoder.rms_norm_eps)
        return super().logits(hidden_RE)

    def linears(self) -> list[Linear]:
        head = [] if self.head is None else [self.head]
        return [self.fc, *self.layer.linears(), *head]

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders by the authors' names with the prefix ``draft.``."""
        found = linear_weight_loaders("draft", self.fc, {"fc": self.spec.hidden_size})
        found |= self.layer.weight_loaders("draft.midlayer")
        found |= {
            f"draft.{name}.weight": WeightLoader.of(table) for name, table in self._tables().items()
        }
        return found | self._head_loader()

    def _plain_weights(self) -> list[torch.Tensor]:
        return [*self.layer.plain_weights(), *self._tables().values()]

    def _tables(self) -> dict[str, torch.Tensor]:
        """Tensors that belong neither to a linear layer nor to the decoder layer, by name."""
        found = {
            "input_norm": self.feature_norm_F,
            "norm": self.final_norm_E,
            "embed_tokens": self.embedding_VE,
            **{f"fc_norm.{index}": norm for index, norm in enumerate(self.feature_norms)},
        }
        return {name: table for name, table in found.items() if table is not None}
