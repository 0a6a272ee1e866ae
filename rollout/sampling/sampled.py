"""The results of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.types import TokenExtras


@dataclass(kw_only=True, slots=True)
class Sampled:
    """The sample of each row. A row that is no distribution has token -1."""

    tokens: list[int]
    logprobs: list[float]
    extras: list[TokenExtras]  # per row, each list of length one or empty; maybe NO_EXTRAS
