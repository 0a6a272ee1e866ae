"""What the engine asks of a language model.

Legend: T query rows, R sampled rows, E hidden, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollout.layers.destination import Destination
from rollout.layers.linear import Linear
from rollout.models.features import Taps
from rollout.models.spec import ModelSpec


class LayerAttention(Protocol):
    """One step's attention, handed to ``forward``. The model knows of no pool, slot or plan."""

    def run(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        """Attend from every row, in layer ``layer``. Returns [T, H, D] in the dtype of q.

        The inputs are rotated already and may be strided views.
        """
        ...


class CausalLM(Protocol):
    """A decoder-only transformer over flat rows. Calls belong under torch.inference_mode."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: LayerAttention,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E], final norm applied, in the model's dtype; T may be zero.

        ``taps``, where given, is shown the hidden states on the way.
        """
        ...

    def embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, E] in the model's dtype: a new tensor."""
        ...

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, V] in the model's dtype."""
        ...

    def linears(self) -> list[Linear]:
        """Every matrix product of the model, the head included."""
        ...

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint names to where their tensors go. Ask anew for each load or update: tied
        names remember which of them was written."""
        ...

    def finish_loading(self) -> None:
        """Call when the writes of a load or update are done: packs what was written."""
        ...

    def release(self) -> int:
        """Free the memory of every weight; the bytes freed. Only ``allocate`` may come next."""
        ...

    def allocate(self) -> None:
        """Memory for every weight again, to be written to; on a GPU maybe at new addresses."""
        ...
