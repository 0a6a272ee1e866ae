"""The answers of transformers' models to what was rolled out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from rollout import Rollout


@torch.inference_mode()
def assert_logprobs(
    rollouts: Iterable[Rollout], model: PreTrainedModel, temperature: float = 1.0
) -> None:
    """Assert that the model gives each token the logprob that was reported."""
    for rollout in rollouts:
        tokens = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        logits = model(tokens).logits[0, len(rollout.prompt_ids) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor([rollout.token_ids]).T)[:, 0]
        torch.testing.assert_close(
            torch.tensor(rollout.logprobs), expected, rtol=1e-4, atol=1e-4, check_dtype=False
        )


@torch.inference_mode()
def chosen_experts(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The experts of each token and sparse layer: [tokens, layers, experts per token]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
        for module in model.modules()
        if hasattr(module, "top_k")
    ]
    model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)
