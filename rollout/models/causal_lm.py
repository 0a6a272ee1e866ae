"""The protocol of a language model.

Legend: T query rows, R sampled rows, E hidden, H query heads, K kv heads, D head dim, V vocabulary;
of the rotary table P positions, D rotary dims; of linear attention C channels, W taps, H key heads
of K, G value heads of V; X experts per token.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollout.models.aux_hidden_states import AuxHiddenStateCollector
from rollout.models.layers.experts import RouteRecorder
from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec
from rollout.ops.paged_attention import PLAIN, AttentionVariant
from rollout.parallel import ModelRanks

__all__ = ["CausalLM", "LayerAttention", "LayerStates", "RouteRecorder"]


class LayerAttention(Protocol):
    """One step's attention, passed to ``forward``. The model knows no pools, slots or plans."""

    def run(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor | None,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        rows_R: torch.Tensor | None = None,
        variant: AttentionVariant = PLAIN,
    ) -> torch.Tensor:
        """Rotate queries and keys, then attend from every row. Returns [T, H, D], dtype of q.

        q, k and v may be strided views. q is rotated in place. k is undefined afterwards and must
        not be read (see `rotary_store_kv_`). ``layer``: index among the attention layers.
        ``v_TKD``: None for latent attention, whose values are the keys without their rotated
        dims. ``rows_R``: attend from these alone, [R, H, D]; all rows have keys and values.
        ``variant``: the layer's own, the same at each call.
        """
        ...


class LayerStates(Protocol):
    """One step's recurrent states, passed to ``forward`` of models with linear attention.

    Every row reads the state of the row before it on its own path and no other. The model does not
    know the states' slots. ``layer``: index among the linear-attention layers.
    """

    def convolve(
        self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
    ) -> torch.Tensor:
        """`ops.causal_conv` over the layer's convolution states: [T, C] in the dtype of x."""
        ...

    def delta_rule(
        self,
        layer: int,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_TGV: torch.Tensor,
        log_decay_TG: torch.Tensor,
        beta_TG: torch.Tensor,
    ) -> torch.Tensor:
        """`ops.gated_delta_rule` over the layer's recurrent states: [T, G, V], dtype of v."""
        ...


class CausalLM(Protocol):
    """A decoder-only transformer over flat rows. Call it under torch.inference_mode."""

    spec: ModelSpec  # of this rank's part
    ranks: ModelRanks
    dtype: torch.dtype
    device: torch.device

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
        """Hidden states [T, E] after the final norm, in the model's dtype. T may be zero.

        Args:
            collector: receives the hidden states on the way.
            states: required if ``spec.linear_attention`` is set, unused otherwise.
            routes: receives the chosen experts.
            num_rows: rows from this index on are padding; default: no padding.
        """
        ...

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, E] in the model's dtype: a new tensor."""
        ...

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the model's dtype."""
        ...

    def linears(self) -> list[Linear]:
        """Every matrix product of the model, including the head."""
        ...

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. Get new ones for each load or update: tied names remember
        which of them was written."""
        ...

    def finish_loading(self) -> None:
        """Call after the last write of a load or update: packs what was written."""
        ...

    def release(self) -> int:
        """Free the memory of every weight. Returns the bytes. Only ``allocate`` may be called
        next."""
        ...

    def allocate(self) -> None:
        """Allocate every weight again, undefined until written; on a GPU maybe at new addresses."""
        ...
