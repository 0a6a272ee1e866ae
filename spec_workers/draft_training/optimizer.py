"""The optimizer of a draft: Muon for the matrices between its norms, AdamW for the rest.

Muon (Jordan et al. 2024) makes each update of a matrix orthogonal; with the little text a draft is
trained on it needs a fraction of AdamW's steps. The head is a table of tokens, for which AdamW
(Loshchilov and Hutter 2019) is better.
"""

from __future__ import annotations

from typing import Any

import torch

from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft import TrainableDraft

_MOST_NORM = 10.0  # of the gradient; far above the usual, so that only outliers are cut


class DraftOptimizer:
    def __init__(self, draft: TrainableDraft, config: TrainingConfig) -> None:
        matrices, others = [], []
        for name, parameter in draft.named_parameters():
            is_matrix = parameter.dim() == 2 and not name.endswith("lm_head.weight")
            (matrices if is_matrix else others).append(parameter)
        self._parameters = [*matrices, *others]
        self._warmup_steps = config.warmup_steps
        self._rates = (config.matrix_learning_rate, config.learning_rate)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=self._rates[0], weight_decay=0.0),
            torch.optim.AdamW(others, lr=self._rates[1], betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.steps = 0

    def step(self, rate_scale: float) -> None:
        """Use the gradients and forget them. ``rate_scale``: of the learning rates, beside warmup."""
        torch.nn.utils.clip_grad_norm_(self._parameters, _MOST_NORM)
        scale = rate_scale * min(1.0, (self.steps + 1) / self._warmup_steps)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "optimizers": [each.state_dict() for each in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for optimizer, each in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
