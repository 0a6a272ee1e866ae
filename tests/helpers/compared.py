"""The parts of rollouts that tests compare between engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.types import Rollout


def outcome(rollouts: Iterable[Rollout]) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of each rollout."""
    return [(r.token_ids, r.logprobs) for r in rollouts]


def numbers(rollouts: Iterable[Rollout]) -> list[tuple[Any, ...]]:
    """The values that neither drafts nor company may change, with each rollout's indices."""
    return [
        (r.prompt_index, r.sample_index, r.token_ids, r.logprobs, r.finish_reason, r.extras)
        for r in rollouts
    ]
