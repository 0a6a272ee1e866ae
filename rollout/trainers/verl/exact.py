"""verl's FSDP workers compute the engine's logprobs."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from verl.workers.engine.fsdp import transformer_impl

from rollout.trainers.exact import token_logprobs
from rollout.trainers.exact.models import ExactModels

_MARK = "specrollout_exact"


def train_exactly() -> None:
    """Have the language models of this process, policy and reference, compute the engine's
    logprobs. verl has no extension point here: the forward of its FSDP engine is wrapped.

    Models that are not known are refused at their first forward: see `exact_forward`.
    """
    engine_class, models = transformer_impl.FSDPEngineWithLMHead, ExactModels()
    forward_step = engine_class.forward_step
    if hasattr(forward_step, _MARK):
        return

    @wraps(forward_step)
    def exact_step(engine: Any, *args: Any, **options: Any) -> Any:
        if type(engine).prepare_model_outputs is engine_class.prepare_model_outputs:
            models.enter(engine, engine.module, engine._autocast_dtype)
        return forward_step(engine, *args, **options)

    setattr(exact_step, _MARK, True)
    engine_class.forward_step = exact_step
    transformer_impl.logprobs_from_logits = _logprobs


def _logprobs(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """The logprobs of labels. verl has divided the logits by the temperature."""
    return token_logprobs(logits, labels)
