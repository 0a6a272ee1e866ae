"""A rollout as a TRL trainer takes it."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.types import Rollout


@dataclass(frozen=True, slots=True)
class Completion:
    """At least one token: TRL reads the last one of each."""

    token_ids: list[int]
    logprobs: list[float | None]  # None: unknown, which TRL takes for the trainer's own
    mask: list[int]  # 1: sampled, to be trained on


def completion_of(rollout: Rollout, filler_id: int) -> Completion:
    """The rollout's tokens; ``filler_id``, masked, for one that failed before its first token."""
    if not rollout.token_ids:
        return Completion([filler_id], [None], [0])
    return Completion(rollout.token_ids, [*rollout.logprobs], [1] * len(rollout.token_ids))
