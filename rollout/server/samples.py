"""What is asked of the engine, and what comes back as it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.types import Rollout, SamplingParams, TokenExtras


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample of one prompt."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    prompt_index: int = 0
    sample_index: int = 0
    request_seed: int | None = None  # instead of the one derived from params.seed and the indices
    partial_ids: Sequence[int] = ()  # emitted before; see RolloutEngine.submit
    rid: str | None = None  # the client's name for it, to abort it by; may be shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one sample got since its last delta: of one step, or of several."""

    index: int  # which of the samples asked for
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    extras: TokenExtras = field(default_factory=TokenExtras)
    rollout: Rollout | None = None  # with the last one
