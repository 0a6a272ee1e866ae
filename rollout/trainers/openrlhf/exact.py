"""OpenRLHF's models compute the engine's logprobs."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from rollout.trainers.exact import token_logprobs
from rollout.trainers.exact.models import ExactModels


def train_exactly() -> None:
    """Have the models of this process, policy and reference, compute the engine's logprobs.
    OpenRLHF has no extension point here: the forward of its `Actor` is wrapped.

    Models that are not known are refused at their first forward: see `exact_forward`.
    """
    from openrlhf.models import actor

    forward, models = actor.Actor.forward, ExactModels()

    @wraps(forward)
    def exact(model: Any, *args: Any, **options: Any) -> Any:
        models.enter(model, model.model)  # by now DeepSpeed has wrapped it
        return forward(model, *args, **options)

    actor.Actor.forward = exact
    actor.log_probs_from_logits = _logprobs


def _logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The logprobs of labels. OpenRLHF has divided the logits by the temperature."""
    return token_logprobs(logits, labels)
