"""Warns where a model ends many rollouts at once, which is easily overlooked."""

from __future__ import annotations

import logging

from rollout.engine.tokenizer import PromptEncoder
from rollout.types import Request, Rollout

log = logging.getLogger(__name__)

_MANY = 0.1  # of all rollouts; a model that is well prompted leaves hardly one empty
_FEWEST = 4  # to warn about: one or two may be chance


def are_many_empty(num_empty: int, num_rollouts: int) -> bool:
    """Whether so many rollouts without text are worth a warning."""
    return num_empty > 0 and num_empty >= _MANY * num_rollouts


def empty_outputs_remedy(encoder: PromptEncoder) -> str:
    """Why rollouts may have no text, and what to do."""
    if not encoder.has_chat_template:
        return "the model stopped at once; look at the prompts and at sampling.stop"
    return (
        "the model stopped at once. A chat model does so for text without its chat template: give "
        'messages, [{"role": "user", "content": "..."}], or /v1/chat/completions over HTTP, and '
        "leave a job data.chat_template=auto. Otherwise look at the prompts and at sampling.stop"
    )


class EmptyOutputs:
    """Counts an engine's rollouts without text, and logs one warning where they are many."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._num_rollouts = self._num_empty = 0
        self._warned = False

    def count(self, request: Request, rollout: Rollout) -> None:
        """Count an ended request, unless it continues one that was cut."""
        if not request.partial_len:
            self._num_rollouts += 1
            self._num_empty += rollout.is_empty

    def check(self, num_together: int) -> None:
        """Warn where many counted rollouts are empty. ``num_together``: requests that were decoded
        with them and go on."""
        if self._warned or self._num_empty < _FEWEST:
            return
        if are_many_empty(self._num_empty, self._num_rollouts + num_together):
            self._warned = True
            log.warning(
                "%d of the first %d rollouts have no text: %s",
                self._num_empty,
                self._num_rollouts,
                empty_outputs_remedy(self._encoder),
            )
