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
    decoder's result, so that head, cap and casts are the trainer's, and never are there logits of
    all rows.
    """

    def __init__(self, model: nn.Module, target: Any, left_padding: int = 0) -> None:
        """``target``: the transformers model in ``model``. ``left_padding``: rows before each
        sequence."""
        self._model, self._target, self._first = model, target, left_padding
        self._device = next(target.parameters()).device
        self._output: Any = None
        self._given: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def run(self, ids: Sequence[int]) -> None:
        """Run the decoder on a sequence.

        Raises InvalidInputError for a model without ``logits_to_keep`` or of another layout.
        """
        padded = torch.tensor([[0] * self._first + list(ids)], device=self._device)
        mask = torch.ones_like(padded)
        mask[:, : self._first] = 0
        self._given = {"input_ids": padded}
        if self._first:
            self._given["attention_mask"] = mask
        base = self._target.base_model

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._output = output

        handle = base.register_forward_hook(keep)
        try:
            self._logits(torch.tensor([0]))
        finally:
            handle.remove()
        if not hasattr(self._output, "last_hidden_state"):
            kind = type(self._target).__name__
            raise InvalidInputError("model", kind, "must be a transformers causal language model")

    @torch.no_grad()
    def logits(self, rows_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the head [R, E], and logits [R, V], of rows of the sequence run."""
        rows_R = rows_R.to(self._device) + self._first
        base, kept = self._target.base_model, self._output
        own = base.__dict__.get("forward")
        base.forward = lambda *args, **kwargs: kept
        try:
            logits_RV = self._logits(rows_R)
        finally:
            if own is None:
                del base.forward
            else:
                base.forward = own
        return kept.last_hidden_state[0, rows_R], logits_RV

    def _logits(self, rows_R: torch.Tensor) -> torch.Tensor:
        output = self._model(**self._given, use_cache=False, logits_to_keep=rows_R)
        logits_RV = output.logits[0]
        if len(logits_RV) != len(rows_R):
            kind = type(self._target).__name__
            raise InvalidInputError("model", kind, "its forward must take logits_to_keep")
        return logits_RV
