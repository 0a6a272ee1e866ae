"""The decoder-only transformer of every family.

Most families differ only in their ModelSpec: Llama (Touvron et al. 2023), SmolLM2, SmolLM3 (layers
without rope), Mistral (Jiang et al. 2023), Qwen2 (Yang et al. 2024) and MiMo (Xiaomi 2025; qkv
bias), Qwen3 (Yang et al. 2025; normed q and k, experts), DeepSeek and GLM MoE (latent attention,
experts). The others are subclasses.

Legend: T query rows, R sampled rows, E hidden, V vocabulary, D rotary dims, P positions.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from rollout.models.aux_hidden_states import AuxHiddenStateCollector
from rollout.models.decoder_layer import DecoderLayer, DeltaLayer, Layer
from rollout.models.forward_context import LayerStates, StepAttention
from rollout.models.head_parts import spec_of_rank
from rollout.models.layers.experts import RouteRecorder
from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.own_weights import OwnWeights
from rollout.models.rotary_tables import rotary_tables
from rollout.models.spec import ModelSpec
from rollout.models.vocab_parallel import VocabParallel
from rollout.ops.rms_norm import add_rms_norm, rms_norm


class CausalLM(OwnWeights):
    """A decoder-only transformer over flat rows. Call it under torch.inference_mode.

    Weights are uninitialised until written through ``weight_loaders``.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        """``spec``: of the whole model; the attribute ``spec`` is of this rank's part."""
        self.spec = spec = spec_of_rank(spec, weights.ranks)
        self.weight_factory = weights
        self.ranks = weights.ranks
        self.dtype = weights.dtype
        self.device = weights.device
        self.vocabulary = VocabParallel(spec, weights)
        self.layers = self._make_layers(weights)
        self.final_norm_E = weights.tensor(spec.hidden_size)
        self._cos_sin_PD = rotary_tables(spec, self.device)

    def _make_layers(self, weights: WeightFactory) -> list[Layer]:
        """The layers in order."""
        spec = self.spec
        recurrent = () if spec.linear_attention is None else spec.linear_attention.layers
        attending = spec.attention_layers
        return [
            DeltaLayer(spec, weights, index=recurrent.index(layer), layer=layer)
            if layer in recurrent
            else self.layer_class(spec, weights, index=attending.index(layer), layer=layer)
            for layer in range(spec.num_layers)
        ]

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: StepAttention,
        collector: AuxHiddenStateCollector | None = None,
        *,
        states: LayerStates | None = None,
        routes: RouteRecorder | None = None,
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the final norm, in the model's dtype. T may be zero.

        A norm is fused with the addition before it. Padding rows go to the experts of the first
        row, so that no expert's weights are read for them.

        Args:
            collector: receives the hidden states on the way.
            states: required if ``spec.linear_attention`` is set, unused otherwise.
            routes: receives the chosen experts.
            num_rows: rows from this index on are padding; default: no padding.
        """
        has_padding = num_rows is not None and num_rows < len(input_ids_T)
        copies_first_row = has_padding and self.spec.experts is not None
        residual_TE = hidden_TE = self.embed(input_ids_T)
        norms = [layer.norms_before for layer in self.layers]
        if norms[0][0] is not None:
            eps, unit_offset = self.spec.rms_norm_eps, self.spec.norm_unit_offset
            hidden_TE = rms_norm(residual_TE, norms[0][0], eps, unit_offset)
        next_norms_E = [norm_E for norm_E, _ in norms[1:]] + [self.final_norm_E]
        for index, (layer, next_norm_E) in enumerate(zip(self.layers, next_norms_E, strict=True)):
            if collector is not None:
                collector.enter(index, residual_TE)
            cos_sin_PD = self._cos_sin_PD[index]
            hidden_TE = layer.mix(hidden_TE, positions_T, cos_sin_PD, attention, states)
            hidden_TE = self._add(hidden_TE, residual_TE, norms[index][1])
            if copies_first_row:
                hidden_TE[num_rows:] = hidden_TE[:1]
            hidden_TE = layer.feed_forward(hidden_TE, routes)
            hidden_TE = self._add(hidden_TE, residual_TE, next_norm_E)
        if collector is not None:
            collector.enter(self.spec.num_layers, residual_TE)
            collector.leave(hidden_TE)
        return hidden_TE

    def _add(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, norm_E: torch.Tensor | None
    ) -> torch.Tensor:
        """Add to the residual in place. Returns its norm, or without one the residual itself."""
        if norm_E is None:
            residual_TE += x_TE
            return residual_TE
        spec = self.spec
        return add_rms_norm(x_TE, residual_TE, norm_E, spec.rms_norm_eps, spec.norm_unit_offset)

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, E] in the model's dtype: a new tensor."""
        return self.vocabulary.embed(input_ids_T)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype."""
        return self.vocabulary.logits(hidden_RE)

    def linears(self) -> list[Linear]:
        """Every matrix product of the model, including the head."""
        return [linear for layer in self.layers for linear in layer.linears()] + [
            self.vocabulary.head
        ]

    def _plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer, including the embedding."""
        of_layers = [weight for layer in self.layers for weight in layer.plain_weights()]
        return [self.vocabulary.embedding_WE, *of_layers, self.final_norm_E]

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. Get new ones for each load or update: tied names remember
        which of them was written."""
        found = self.vocabulary.weight_loaders("model.embed_tokens.weight", "lm_head.weight")
        found["model.norm.weight"] = WeightLoader.of(self.final_norm_E)
        for index, layer in enumerate(self.layers):
            found |= layer.weight_loaders(f"model.layers.{index}")
        return found
