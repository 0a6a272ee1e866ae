"""The tokens that a request emits, with their extras, and the finished rollout.

The comment beside a field says who fills it, and when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.types.enums import FinishReason


@dataclass(kw_only=True, slots=True)
class RequestStats:
    """Counters of one request. The scheduler fills the first two, the engine the third, the worker
    the others."""

    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    preemptions: int = 0
    first_token_seconds: float | None = None  # from its submission; None before that token
    verify_steps: int = 0  # target forwards that sampled for this request
    proposed: int = 0  # draft nodes that the worker proposed
    drafted: int = 0  # proposed nodes that were verified
    accepted: int = 0  # verified nodes that were accepted
    expected_accepted: float = 0.0  # sum of the verified nodes' estimated probabilities
    forward_ms: float = 0.0  # its share of its steps' forwards, by query rows
    draft_ms: float = 0.0  # its share of its steps' drafting, by entries
    total_ms: float = 0.0  # its share of its whole steps as measured, by query rows
    predicted_gain_ms: float = 0.0  # expected saving of its drafts
    gain_ms: float = 0.0  # their saving: plain decoding's time by the cost curve less total_ms

    @property
    def accept_length(self) -> float:
        """Tokens emitted per target forward, the target's own included."""
        return (self.verify_steps + self.accepted) / self.verify_steps if self.verify_steps else 0.0


@dataclass(kw_only=True, slots=True)
class TokenExtras:
    """Extras beside `logprobs`: a list has one entry per emitted token if requested, else none."""

    raw_logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    sampling_masks: list[list[int]] = field(default_factory=list)  # ascending token ids
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    token_ids_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def extend(self, later: TokenExtras) -> None:
        """Append the extras of the tokens that follow."""
        for name in TokenExtras.__dataclass_fields__:
            getattr(self, name).extend(getattr(later, name))

    def since(self, first: int) -> TokenExtras:
        """The extras of the tokens from ``first`` on."""
        names = TokenExtras.__dataclass_fields__
        return TokenExtras(**{name: getattr(self, name)[first:] for name in names})


NO_EXTRAS = TokenExtras()
"""The extras of requests that asked for none. Shared: never written to."""


@dataclass(kw_only=True, slots=True)
class EmittedTokens:
    """Tokens that a request emitted, with an entry of each list for each of them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    extras: TokenExtras = field(default_factory=TokenExtras)

    def extend(self, later: EmittedTokens) -> None:
        """Append the tokens that follow."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.weight_versions += later.weight_versions
        self.extras.extend(later.extras)

    def since(self, first: int) -> EmittedTokens:
        """The tokens from ``first`` on."""
        return EmittedTokens(
            token_ids=self.token_ids[first:],
            logprobs=self.logprobs[first:],
            weight_versions=self.weight_versions[first:],
            extras=self.extras.since(first),
        )


@dataclass(kw_only=True, slots=True)
class Rollout(EmittedTokens):
    """A finished request, with all the tokens that it emitted."""

    request_id: int
    prompt_index: int
    sample_index: int
    seed: int  # the request seed, an int64; pass it to submit() to continue a rollout that was cut
    prompt_ids: list[int]
    finish_reason: FinishReason
    text: str | None  # None where the engine has no tokenizer
    stats: RequestStats
    matched_stop: int | str | None = None  # the stop token, stop string or pattern that ended it
    error: str | None = None
    routed_experts: NDArray[np.integer] | None = field(default=None, compare=False)
    """[P, sparse layers, experts per token], uint8 or int16, the most probable expert first; None
    unless requested. P = len(prompt_ids) + len(token_ids) - 1, since the last token was sampled and
    not run; fewer only for a rollout that was aborted before its first token."""

    @property
    def is_empty(self) -> bool:
        """Whether it stopped without text; without a tokenizer, at the first token."""
        if self.finish_reason is not FinishReason.STOP:
            return False
        return len(self.token_ids) <= 1 if self.text is None else not self.text.strip()

    @property
    def weight_version_spans(self) -> list[tuple[int, int, int]]:
        """(version, start, end): token_ids[start:end] were sampled by weights of that version."""
        spans: list[tuple[int, int, int]] = []
        for index, version in enumerate(self.weight_versions):
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], index + 1)
            else:
                spans.append((version, index, index + 1))
        return spans
