"""TRL's trainers with the engine's logprobs."""

from __future__ import annotations

from typing import Any

import torch

from rollout.errors import InvalidInputError
from rollout.trainers.exact import token_logprobs
from rollout.trainers.exact.models import ExactModels

_Logprobs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class ExactLogprobs:
    """Before GRPOTrainer or RLOOTrainer in a class: its policy computes the engine's logprobs, so
    that ratios of what was just sampled are exactly 1::

        class ExactTrainer(ExactLogprobs, GRPOTrainer): ...

    Text alone, without the routers' auxiliary loss. The policy stays exact after training; a
    reference model is an ordinary one.
    """

    temperature: float
    model: Any
    accelerator: Any
    _exact: ExactModels | None = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> _Logprobs:
        """Logprobs and entropies of the last ``logits_to_keep`` tokens, [B, T]; no auxiliary loss.

        Raises InvalidInputError for media and the auxiliary loss.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                raise InvalidInputError(name, type(value).__name__, "is not for exact training")
        if self.accelerator.unwrap_model(model) is self.accelerator.unwrap_model(self.model):
            self._exact = self._exact or ExactModels()
            self._exact.enter(self, model)
        logprobs, entropies = [], []
        for ids, mask in zip(
            *(each.split(batch_size or len(input_ids)) for each in (input_ids, attention_mask)),
            strict=True,
        ):
            logits = model(
                input_ids=ids,
                attention_mask=mask,
                logits_to_keep=logits_to_keep + 1,
                use_cache=False,
            ).logits[:, :-1]
            logprobs.append(token_logprobs(logits, ids[:, -logits_to_keep:], self.temperature))
            if compute_entropy:
                with torch.no_grad():
                    rows = (logits.float() / self.temperature).log_softmax(-1)
                    entropies.append(-(rows.exp() * rows).sum(-1))
        return torch.cat(logprobs), torch.cat(entropies) if entropies else None, None
