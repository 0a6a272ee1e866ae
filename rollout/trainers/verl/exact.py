"""verl's FSDP workers train by the engine's bits."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from verl.workers.engine.fsdp import transformer_impl

from rollout.trainers.exact import exact_forward, token_logprobs

_contexts = ExitStack()  # of the models of this process, for as long as it lives


def train_exactly() -> None:
    """Have the language models of this process, policy and reference, compute the engine's
    logprobs. verl has no extension point here: the forward of its FSDP engine is wrapped.

    Models that are not known are refused at their first forward: see `exact_forward`.
    """
    engine_class = transformer_impl.FSDPEngineWithLMHead
    forward_step = engine_class.forward_step
    if hasattr(forward_step, "__wrapped__"):
        return
    entered: set[int] = set()

    @wraps(forward_step)
    def exact_step(engine: Any, *args: Any, **options: Any) -> Any:
        is_language_model = type(engine).prepare_model_outputs is engine_class.prepare_model_outputs
        if is_language_model and id(engine) not in entered:
            entered.add(id(engine))
            _contexts.enter_context(exact_forward(engine.module))
        return forward_step(engine, *args, **options)

    engine_class.forward_step = exact_step
    transformer_impl.logprobs_from_logits = _logprobs


def _logprobs(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """By logits that verl has divided by the temperature."""
    return token_logprobs(logits, labels)
