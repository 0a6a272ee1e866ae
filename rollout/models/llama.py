"""The Llama family: Llama, SmolLM2, SmolLM3 (layers without rope), Mistral, Qwen2 and MiMo (qkv
bias), Qwen3 (normed q and k) and Qwen3-MoE (experts).

Sources: Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen2 (Yang et al. 2024), MiMo
(Xiaomi 2025), Qwen3 (Yang et al. 2025). They differ only in their ModelSpec.

Legend: T query rows, R sampled rows, E hidden, V vocabulary, D rotary dims, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from rollout.models.aux_hidden_states import AuxHiddenStateCollector
from rollout.models.causal_lm import LayerAttention, LayerStates, RouteRecorder
from rollout.models.decoder_layer import DecoderLayer
from rollout.models.head_parts import spec_of_rank
from rollout.models.layers.linear import Linear
from rollout.models.layers.rope import cos_sin_table
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.own_weights import OwnWeights
from rollout.models.spec import ModelSpec
from rollout.models.vocab_parallel import VocabParallel
from rollout.ops.rms_norm import add_rms_norm, rms_norm


class ModelLayer(Protocol):
    """One layer of a model."""

    @property
    def norms_before(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The norms of the mixer's and of the MLP's input; None: they read the residual itself."""
        ...

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: LayerAttention,
        states: LayerStates | None,
    ) -> torch.Tensor:
        """The mixer's output [T, E], from each row and those before it, to add to the residual."""
        ...

    def feed_forward(self, hidden_TE: torch.Tensor, routes: RouteRecorder | None) -> torch.Tensor:
        """The MLP's output [T, E], from each row alone, to add to the residual."""
        ...

    def linears(self) -> list[Linear]:
        """The layer's matrix products."""
        ...

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer."""
        ...

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name, which begins with ``at``."""
        ...


class LlamaLayer(DecoderLayer):
    """A decoder layer with a norm before its attention: a `ModelLayer`."""

    def __init__(
        self, spec: ModelSpec, weights: WeightFactory, *, index: int = 0, layer: int = 0
    ) -> None:
        """``index``: among the attention layers. ``layer``: among all layers."""
        super().__init__(spec, weights, layer=layer)
        self.index = index
        self.input_norm_E = weights.tensor(spec.hidden_size)

    @property
    def norms_before(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.input_norm_E, self.mlp_norm_E

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: LayerAttention,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        return self.attend(self.index, hidden_TE, positions_T, cos_sin_PD, attention)

    def _norms(self) -> dict[str, torch.Tensor]:
        return {"input_layernorm": self.input_norm_E, **super()._norms()}


class Llama(OwnWeights):
    """A `CausalLM`. Weights are uninitialised until written through ``weight_loaders``."""

    layer_class: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        """``spec``: of the whole model; the attribute ``spec`` is of this rank's part."""
        self.spec = spec = spec_of_rank(spec, weights.ranks)
        self.ranks = weights.ranks
        self.dtype = weights.dtype
        self.device = weights.device
        self.vocabulary = VocabParallel(spec, weights)
        self.layers = self._make_layers(weights)
        self.final_norm_E = weights.tensor(spec.hidden_size)
        self._cos_sin_PD = self._rotary_tables()

    def _make_layers(self, weights: WeightFactory) -> Sequence[ModelLayer]:
        """The layers in order."""
        layers = range(self.spec.num_layers)
        return [self.layer_class(self.spec, weights, index=each, layer=each) for each in layers]

    def _rotary_tables(self) -> list[torch.Tensor]:
        """The rotary table of each layer; layers with the same rope share it."""
        spec, device = self.spec, self.device
        ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
        tables = {
            rope: torch.empty(spec.max_context_len, 0, device=device)
            if rope is None
            else cos_sin_table(rope, spec.rotary_dim, spec.max_context_len, device)
            for rope in set(ropes)
        }
        return [tables[rope] for rope in ropes]

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: LayerAttention,
        collector: AuxHiddenStateCollector | None = None,
        *,
        states: LayerStates | None = None,
        routes: RouteRecorder | None = None,
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the final norm. A norm is fused with the addition before it.

        Padding rows go to the experts of the first row, so that no expert's weights are read for
        them.
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
        return self.vocabulary.embed(input_ids_T)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.logits(hidden_RE)

    def linears(self) -> list[Linear]:
        return [linear for layer in self.layers for linear in layer.linears()] + [
            self.vocabulary.head
        ]

    def _plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer, including the embedding."""
        of_layers = [weight for layer in self.layers for weight in layer.plain_weights()]
        return [self.vocabulary.embedding_WE, *of_layers, self.final_norm_E]

    def weight_loaders(self) -> dict[str, WeightLoader]:
        found = self.vocabulary.weight_loaders("model.embed_tokens.weight", "lm_head.weight")
        found["model.norm.weight"] = WeightLoader.of(self.final_norm_E)
        for index, layer in enumerate(self.layers):
            found |= layer.weight_loaders(f"model.layers.{index}")
        return found
