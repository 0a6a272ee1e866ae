"""One step of an MTP chain: a decoder layer over a token's embedding and the hidden state before.

Legend: T query rows, R rows whose logits are computed, E hidden, V vocabulary, P
positions.
"""

from __future__ import annotations

import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.draft_model import DraftModel, DraftSpec, selected
from rollout.models.forward_context import StepAttention
from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.mtp.layout import StepNames
from rollout.ops.rms_norm import add_rms_norm, rms_norm


class ChainTensors:
    """Makes each named tensor of a chain once, so that steps with the same name share it."""

    def __init__(self, weights: WeightFactory) -> None:
        self.weights = weights
        self._tables: dict[str, torch.Tensor] = {}
        self._linears: dict[str, Linear] = {}

    def table(self, name: str, *shape: int) -> torch.Tensor:
        """A parameter of this shape, uninitialised."""
        if name not in self._tables:
            self._tables[name] = self.weights.tensor(*shape)
        return self._tables[name]

    def linear(self, name: str, inputs: int, outputs: int) -> Linear:
        """A matrix product of these sizes, uninitialised."""
        if name not in self._linears:
            self._linears[name] = self.weights.linear(inputs, outputs)
        return self._linears[name]


class MtpStep(DraftModel):
    """The network of one step of an MTP chain.

    Its hidden states are those after its own final norm: the head and the next step read the same.
    """

    def __init__(
        self,
        spec: DraftSpec,
        target: CausalLM,
        names: StepNames,
        tensors: ChainTensors,
        *,
        cos_sin_PD: torch.Tensor,
        hidden_first: bool,
    ) -> None:
        """
        Args:
            tensors: shared by the steps of the chain.
            hidden_first: as in `MtpLayout`.
        """
        super().__init__(spec, target, tensors.weights)
        self.names = names
        self._cos_sin_PD = cos_sin_PD
        self._hidden_first = hidden_first
        hidden = spec.hidden_size
        self._embedding_norm_E = tensors.table(names.embedding_norm, hidden)
        self._hidden_norm_E = tensors.table(names.hidden_norm, hidden)
        self._projection = tensors.linear(names.projection, 2 * hidden, hidden)
        self._layer = DecoderLayer(spec.decoder, tensors.weights)
        self._final_norm_E = tensors.table(names.final_norm, hidden)
        self._embedding_VE = (
            None
            if names.embedding is None
            else tensors.table(names.embedding, spec.decoder.vocab_size, hidden)
        )
        if names.head is not None:
            self.head = tensors.linear(names.head, hidden, spec.draft_vocab_size)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layer, decoder = self._layer, self.spec.decoder
        eps, unit_offset = decoder.rms_norm_eps, decoder.norm_unit_offset
        embedded_TE = self.embedded(self._embedding_VE, input_ids_T)
        joined = [
            rms_norm(embedded_TE, self._embedding_norm_E, eps, unit_offset),
            rms_norm(hidden_TE, self._hidden_norm_E, eps, unit_offset),
        ]
        if self._hidden_first:
            joined.reverse()
        residual_TE = self._projection(torch.cat(joined, dim=1))
        hidden_TE = rms_norm(residual_TE, layer.input_norm_E, eps, unit_offset)
        hidden_TE = layer.attend(hidden_TE, positions_T, self._cos_sin_PD, attention, rows_R)
        residual_TE = selected(residual_TE, rows_R)
        hidden_TE = add_rms_norm(hidden_TE, residual_TE, layer.mlp_norm_E, eps, unit_offset)
        hidden_TE = layer.feed_forward(hidden_TE)
        return add_rms_norm(hidden_TE, residual_TE, self._final_norm_E, eps, unit_offset)

    def linears(self) -> list[Linear]:
        head = [] if self.head is None else [self.head]
        return [self._projection, *self._layer.linears(), *head]

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders by the checkpoint's own names."""
        found = {name: WeightLoader.of(table) for name, table in self._tables().items()}
        found[self.names.projection] = self._projection.weight_rows(0, self.spec.hidden_size)
        found |= self._layer.weight_loaders(self.names.decoder)
        if self.head is not None and self.names.head is not None:
            found[self.names.head] = self.head.weight_rows(0, self.spec.draft_vocab_size)
        return found

    def _plain_weights(self) -> list[torch.Tensor]:
        return [*self._layer.plain_weights(), *self._tables().values()]

    def _tables(self) -> dict[str, torch.Tensor]:
        names = self.names
        found = {
            names.embedding_norm: self._embedding_norm_E,
            names.hidden_norm: self._hidden_norm_E,
            names.final_norm: self._final_norm_E,
        }
        if names.embedding is not None and self._embedding_VE is not None:
            found[names.embedding] = self._embedding_VE
        return found
