"""Trains a draft on batches of sequences by AdamW (Loshchilov and Hutter 2019) with warmup.

Legend: D draft vocabulary, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.held_out import (
    HeldOutResult,
    TreeShape,
    held_out_accept_length,
)
from spec_workers.draft_training.loss import UnrolledLoss, unrolled_loss
from spec_workers.draft_training.packed_rows import PackedRows
from spec_workers.draft_training.sequences import TrainingSequence

_MAX_NORM = 10.0  # of the gradient; far above the usual, so that only outliers are clipped


class DraftOptimizer:
    """AdamW with warmup and gradient clipping."""

    def __init__(self, draft: TrainableDraft, config: TrainingConfig) -> None:
        self._parameters = list(draft.parameters())
        self._rate = config.learning_rate
        self._warmup_steps = config.warmup_steps
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.steps = 0

    def step(self, rate_scale: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        warmup = min(1.0, (self.steps + 1) / self._warmup_steps)
        for group in self._adamw.param_groups:
            group["lr"] = self._rate * rate_scale * warmup
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        # torch would use the tensors themselves, and steps would write to the caller's state.
        self._adamw.load_state_dict(deepcopy(state["adamw"]))


SENT_PREFIX = "draft."
"""Prefix of the names by which an engine knows a draft's weights."""


class DraftTrainer:
    """A draft, its optimizer, and the target's head for the labels."""

    def __init__(
        self, draft: TrainableDraft, head_DE: torch.Tensor, config: TrainingConfig
    ) -> None:
        """``head_DE``: see `take_head`."""
        self.draft = draft
        self.config = config
        self.features = draft.features | AuxHiddenStates(final=True)
        """The layout of the features of every training sequence."""
        self._device = next(draft.parameters()).device
        self._optimizer = DraftOptimizer(draft, self.config)
        self.take_head(head_DE)

    @property
    def steps(self) -> int:
        return self._optimizer.steps

    def take_head(self, head_DE: torch.Tensor) -> None:
        """Use this head for labels from now on: the target's rows of the draft's tokens."""
        self._head_DE = head_DE.detach().to(self._device)

    def step(
        self,
        batch: Sequence[TrainingSequence],
        rate_scale: float = 1.0,
        num_steps: int | None = None,
    ) -> UnrolledLoss:
        """Do one optimizer step.

        Args:
            rate_scale: factor of the configured learning rate besides warmup.
            num_steps: guesses to unroll; default: the configured number.
        """
        rows = PackedRows(batch, self.features, self.draft.features, self._device)
        with self._autocast():
            loss = unrolled_loss(
                self.draft, rows, self._head_DE, num_steps or self.config.num_steps
            )
        loss.total.backward()
        self._optimizer.step(rate_scale)
        return loss

    def held_out_accept_length(
        self, sequences: Sequence[TrainingSequence], shape: TreeShape | None = None
    ) -> HeldOutResult:
        """Measure the draft on held-out sequences. Changes nothing."""
        own = [
            replace(
                each,
                features_NF=self.features.select(each.features_NF, self.draft.features),
            )
            for each in sequences
        ]
        with self._autocast():
            return held_out_accept_length(self.draft, own, shape or TreeShape())

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Copies of the draft's float32 weights, by the names that an engine's update takes."""
        return [
            (SENT_PREFIX + name, parameter.detach().clone())
            for name, parameter in self.draft.named_parameters()
        ]

    def load_named_tensors(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights by the names that an engine knows. The optimizer's state stays."""
        tensors = {name.removeprefix(SENT_PREFIX): tensor for name, tensor in named_tensors}
        self.draft.load_state_dict(tensors)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state, to continue exactly where training stopped."""
        return {"draft": self.draft.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draft.load_state_dict(state["draft"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.config.autocast)
