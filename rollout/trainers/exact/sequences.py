"""The sequences of the batch that a model runs, alike for all of its layers."""

from __future__ import annotations

import torch

from rollout.errors import InvalidInputError
from rollout.models.rotary_tables import rotary_tables
from rollout.models.spec import ModelSpec
from rollout.trainers.exact.layout import SequenceLayout

_Given = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

_KEPT = 2  # layouts: transformers makes two masks for models with windows


class Sequences:
    """Makes the layout of a batch once for all layers. ``tables``: rotary tables by layer."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec = spec
        self.tables = rotary_tables(spec, device)
        self._layouts: list[tuple[tuple[object, ...], _Given, SequenceLayout]] = []

    def layout(
        self,
        hidden_BTE: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seq_lens: torch.Tensor | None,
    ) -> SequenceLayout:
        """The layout of a batch. Raises what `SequenceLayout.of` does, and InvalidInputError for
        sequences longer than the model's."""
        shape = (hidden_BTE.shape[0], hidden_BTE.shape[1])
        given = mask, position_ids, cu_seq_lens
        # The tensors are held, so that an id stays theirs.
        key = shape, *map(_identity, given)
        for known, _, layout in self._layouts:
            if known == key:
                return layout
        layout = SequenceLayout.of(shape, *given, hidden_BTE.device)
        longest, limit = layout.plan.req_to_token.shape[1] - 1, self.spec.max_context_len
        if longest > limit:
            raise InvalidInputError("input_ids", longest, f"the model's positions end at {limit}")
        self._layouts = [*self._layouts, (key, given, layout)][-_KEPT:]
        return layout


def _identity(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Another one once a tensor has been written to; of those made in inference mode nobody can
    tell."""
    if tensor is None or tensor.is_inference():
        return id(tensor), 0
    return id(tensor), tensor._version
