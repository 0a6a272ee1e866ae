"""A trainer's forward of one sequence, whose logits come in blocks of rows.

Legend: T rows, E hidden, R rows of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rollout.errors import InvalidInputError


class TrainerForward:
    """Runs the model as the trainer has it: wrapped, in its mode, without gradients.

    The decoder is run once. For each block of rows the model's own forward is run again on the
    decoder's result, so that head, cap and casts are the trainer's, and logits of all rows are
    never held.
    """

    def __init__(self, model: nn.Module, target: Any, left_padding: int) -> None:
        """``target``: the transformers model in ``model``. ``left_padding``: rows before each
        sequence."""
        self._model, self._target, self._first = model, target, left_padding
        self._device = next(target.parameters()).device
        self._given: dict[str, torch.Tensor] = {}
        self._output: Any = None  # of the decoder
        self.autocast: torch.dtype | None = None  # of the latest forward, inside its wrappers

    @torch.no_grad()
    def run(self, ids: Sequence[int]) -> None:
        """Run the decoder on a sequence. Raises InvalidInputError for a model that does not take
        ``logits_to_keep``."""
        ids_BT = torch.tensor([[0] * self._first + list(ids)], device=self._device)
        mask_BT = (torch.arange(ids_BT.shape[1], device=self._device) >= self._first).long()[None]
        self._given = {"input_ids": ids_BT}
        if self._first:
            self._given["attention_mask"] = mask_BT
        handle = self._target.base_model.register_forward_hook(self._keep)
        try:
            self._logits(torch.tensor([0]))
        finally:
            handle.remove()

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output, kind = output, self._device.type
        is_on = torch.is_autocast_enabled(kind)
        self.autocast = torch.get_autocast_dtype(kind) if is_on else None

    @torch.no_grad()
    def logits(self, rows_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the head [R, E], and logits [R, V], of rows of the sequence run."""
        rows_R = rows_R.to(self._device) + self._first
        base, output = self._target.base_model, self._output
        own = base.__dict__.get("forward")
        base.forward = lambda *args, **kwargs: output
        try:
            logits_RV = self._logits(rows_R)
        finally:
            del base.forward
            if own is not None:
                base.forward = own
        return output.last_hidden_state[0, rows_R], logits_RV

    def _logits(self, rows_R: torch.Tensor) -> torch.Tensor:
        found = self._model(**self._given, use_cache=False, logits_to_keep=rows_R).logits[0]
        if len(found) != len(rows_R):
            kind = type(self._target).__name__
            raise InvalidInputError("model", kind, "its forward must take logits_to_keep")
        return found
