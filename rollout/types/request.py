"""A request, and what decides where it ends and what it may emit.

The comment beside a field says who fills it, and when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types.enums import FinishReason
from rollout.types.rollout import EmittedTokens, RequestStats, TokenExtras
from rollout.types.sampling_params import SamplingParams

ChatMessages = list[dict[str, str]]
Prompt = str | Sequence[int] | ChatMessages


class StopCheck(Protocol):
    """Decides where a request ends. Made by the engine, asked by the worker before commit."""

    stop_token_ids: frozenset[int]  # the end-of-sequence tokens among them, unless ignored

    def first_stop(
        self, request: Request, new_token_ids: Sequence[int]
    ) -> tuple[int, FinishReason | None]:
        """The number of ``new_token_ids``, which follow the request's, to emit, and why to stop.

        None: the request continues. A pure function, since a step that failed asks again.
        """
        ...

    def matched(self, request: Request) -> int | str:
        """The token or the text that ended a request whose finish reason is a stop."""
        ...


class TokenConstraint(Protocol):
    """Says which tokens a request may emit: a grammar, a list of tokens, words to be left out.

    Made by the engine, asked by the sampler.
    """

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens that must not follow the request's own and ``drafted`` ones, ascending.

        A pure function of these tokens, since a step that failed asks again.
        """
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One sample of one prompt on its way to becoming a Rollout."""

    request_id: int  # engine, at submit; unique in the engine's life
    tokens: list[int]  # prompt, then what was emitted: the scheduler appends at commit
    prompt_len: int  # engine
    partial_len: int = 0  # engine: last prompt tokens that were generated earlier (resubmission)
    params: SamplingParams  # engine
    seed: int  # engine: in [0, 2**64)
    group: int  # engine: stable 64-bit key of the prompt, shared by its samples
    prompt_index: int = 0  # engine
    sample_index: int = 0  # engine
    stop_check: StopCheck  # engine
    constraints: Sequence[TokenConstraint] = ()  # engine
    submitted: float = field(default_factory=time.monotonic)

    computed_len: int = 0  # scheduler: tokens whose KV is in slots
    row: int = -1  # scheduler: row of req_to_token while running
    logprobs: list[float] = field(default_factory=list)  # scheduler, at commit
    weight_versions: list[int] = field(default_factory=list)  # scheduler, at commit
    extras: TokenExtras = field(default_factory=TokenExtras)  # scheduler, at commit
    finish_reason: FinishReason | None = None  # scheduler, at commit or abort
    error: str | None = None  # scheduler, at commit; with FinishReason.ERROR
    routed_experts: NDArray[np.integer] | None = None  # scheduler, when its slots are released
    stats: RequestStats = field(default_factory=RequestStats)
    max_len: int = field(init=False)  # tokens, the prompt's included, that max_new_tokens allows

    def __post_init__(self) -> None:
        self.max_len = self.prompt_len - self.partial_len + self.params.max_new_tokens

    @property
    def token_ids(self) -> list[int]:
        """The emitted tokens."""
        return self.tokens[self.prompt_len :]

    def emitted_since(self, first: int) -> EmittedTokens:
        """The emitted tokens from ``first`` on."""
        return EmittedTokens(
            token_ids=self.tokens[self.prompt_len + first :],
            logprobs=self.logprobs[first:],
            weight_versions=self.weight_versions[first:],
            extras=self.extras.since(first),
        )

    @property
    def generated_len(self) -> int:
        """Tokens that count against min/max_new_tokens."""
        return len(self.tokens) - self.prompt_len + self.partial_len

    @property
    def remaining_len(self) -> int:
        """Tokens it may still emit before max_new_tokens ends it."""
        return self.max_len - len(self.tokens)

    @property
    def extend_len(self) -> int:
        """Committed tokens that still need their KV; the last of them is the root."""
        return len(self.tokens) - self.computed_len
