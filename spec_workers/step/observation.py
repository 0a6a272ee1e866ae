"""The results of a step that proposers and the budget learn from."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.runner.model_runner import Forwarded
from rollout.types import Batch, DraftTrees, EntryResult, Scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A finished step as `observe` sees it, when accepted nodes' slots are in ``req_to_token``.

    The requests of the batch do not hold the emitted tokens yet: the scheduler appends them after.
    """

    batch: Batch
    trees: DraftTrees  # as verified
    was_asked: bool  # whether anything was asked for
    forwarded: Forwarded
    results: list[EntryResult]  # parallel to the batch's entries

    @property
    def runs_prompts(self) -> bool:
        """Whether any entry runs tokens of a prompt."""
        return any(runs_prompt(entry) for entry in self.batch.entries)


def runs_prompt(entry: Scheduled) -> bool:
    """Whether a prompt's tokens are among those the entry runs."""
    return entry.start < entry.request.prompt_len
