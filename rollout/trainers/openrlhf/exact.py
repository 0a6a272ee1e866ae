"""OpenRLHF's models train by the engine's bits."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from rollout.trainers.exact import exact_forward, token_logprobs

_contexts = ExitStack()  # of the models of this process, for as long as it lives


def train_exactly() -> None:
    """Have the policies of this process, a reference among them, compute the engine's logprobs.
    OpenRLHF has no extension point here: the forward of its `Actor` is wrapped.

    Models that are not known are refused at their first forward: see `exact_forward`.
    """
    from openrlhf.models import actor

    forward = actor.Actor.forward
    entered: set[int] = set()

    @wraps(forward)
    def exact(model: Any, *args: Any, **options: Any) -> Any:
        if id(model) not in entered:  # by now DeepSpeed has wrapped it
            entered.add(id(model))
            _contexts.enter_context(exact_forward(model.model))
        return forward(model, *args, **options)

    actor.Actor.forward = exact
    actor.log_probs_from_logits = _logprobs


def _logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """By logits that OpenRLHF has divided by the temperature."""
    return token_logprobs(logits, labels)
