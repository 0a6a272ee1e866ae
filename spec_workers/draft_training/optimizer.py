"""The optimizer of a draft: AdamW (Loshchilov and Hutter 2019), warmed up."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft import TrainableDraft

_MAX_NORM = 10.0  # of the gradient; far above the usual, so that only outliers are cut


class DraftOptimizer:
    def __init__(self, draft: TrainableDraft, config: TrainingConfig) -> None:
        self._parameters = list(draft.parameters())
        self._rate = config.learning_rate
        self._warmup_steps = config.warmup_steps
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.steps = 0

    def step(self, rate_scale: float) -> None:
        """Use the gradients, and forget them. ``rate_scale``: of the rate, beside warmup."""
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
        # torch takes the tensors themselves, and steps would write to the caller's state.
        self._adamw.load_state_dict(deepcopy(state["adamw"]))
