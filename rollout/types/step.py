"""The data of a step: its batch, its draft trees and its results.

The comment beside a field says who fills it, and when.

Shape legend: B entries of a batch, T query rows of a step, N draft nodes of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollout.types.enums import FinishReason
from rollout.types.request import Request
from rollout.types.rollout import NO_EXTRAS, TokenExtras

MAX_TREE_NODES = 64
"""Nodes of one draft tree, root included: an ancestor mask is one 64-bit word."""


@dataclass(kw_only=True, slots=True)
class ScheduledStates:
    """State slots of one entry: the state it begins with, and slots for those the step computes.

    The step never writes to the source. Commit notes the slot of the last accepted node. The end of
    the step makes it the request's, and frees the source and the others.
    """

    source: int  # scheduler: slot of the state after [0, start); 0: no tokens yet
    run_end: int  # scheduler: slot for the state after the run
    nodes: np.ndarray  # scheduler: int32, one for each of the entry's draft_slots
    checkpoints: dict[int, int]  # scheduler: token count inside the run -> slot for the state there


@dataclass(kw_only=True, slots=True)
class Scheduled:
    """One request's part in one step: a causal run of committed tokens, then draft nodes.

    A run that reaches the end of the committed tokens ends in the root and is sampled from; a
    shorter one is a prefill chunk.
    """

    request: Request  # scheduler
    start: int  # scheduler: position of the run's first token; KV holds [0, start)
    run_len: int  # scheduler: >= 1; req_to_token holds the slots of [0, start + run_len)
    draft_slots: np.ndarray  # scheduler: int32 KV slots reserved for draft nodes, maybe none
    states: ScheduledStates | None = None  # scheduler; None: the target has no recurrent layers
    samples: bool = field(init=False)  # whether the run ended the tokens when it was scheduled

    def __post_init__(self) -> None:
        self.samples = self.start + self.run_len == len(self.request.tokens)

    @property
    def end(self) -> int:
        """Position after the run's last token."""
        return self.start + self.run_len


class Remaining(NamedTuple):
    """Tokens that a request has yet to emit."""

    expected: float  # if it had no limit
    limit: int  # at most, >= 1


@dataclass(kw_only=True, slots=True)
class Tail:
    """The end of a batch: no request waits to replace one that ends."""

    replaced: float  # scheduler: share of the ended requests that a later one replaced, in [0, 1]
    remaining: Callable[[Request], Remaining]  # scheduler


@dataclass(kw_only=True, slots=True)
class Batch:
    """The entries of one step."""

    step: int  # scheduler: counts up
    entries: list[Scheduled]  # scheduler
    tail: Tail | None = None  # scheduler; None: requests wait
    num_run_tokens: int = field(init=False)  # draft nodes not counted
    num_sampling: int = field(init=False)  # requests that sample

    def __post_init__(self) -> None:
        self.num_run_tokens = sum([entry.run_len for entry in self.entries])
        self.num_sampling = sum([entry.samples for entry in self.entries])


@dataclass(kw_only=True, slots=True)
class DraftTrees:
    """The draft nodes of a batch, flat, without the roots. Filled by the worker's propose().

    Within an entry, tree node 0 is the root and draft node j (from 0) is tree node j + 1. Parents
    come before their children. A mask has bit k set when tree node k is on the node's path, the
    node itself and the root included. Entries that do not sample have no nodes.
    """

    offsets_B1: np.ndarray  # int64; entry b owns nodes [offsets[b], offsets[b + 1])
    tokens_N: np.ndarray  # int32
    parents_N: np.ndarray  # int32, tree numbering
    depths_N: np.ndarray  # int32, root 0
    masks_N: np.ndarray  # uint64
    probs_N: np.ndarray  # float32: estimated probability that the node is accepted
    sources_N: np.ndarray  # uint8: which of the worker's sources a node comes from

    @property
    def num_nodes(self) -> int:
        """Draft nodes of all entries, N."""
        return int(self.offsets_B1[-1])


@dataclass(kw_only=True, slots=True)
class EntryResult:
    """One step's result for one entry. Filled by the worker; empty for a prefill chunk."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    extras: TokenExtras = field(default_factory=lambda: NO_EXTRAS)
    path: list[int] = field(default_factory=list)  # accepted draft nodes, tree numbering, in order
    num_drafted: int = 0  # draft nodes verified
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """Milliseconds of one step by phase."""

    schedule: float = 0.0  # engine
    draft: float = 0.0  # worker: propose, observe and learn
    forward: float = 0.0  # worker: hidden states and logits
    sample: float = 0.0  # worker: sampling, acceptance, commit
    total: float = 0.0  # engine


@dataclass(kw_only=True, slots=True)
class StepForecast:
    """The expected cost and gain of a step. Filled by the worker before the step ran.

    Milliseconds of drafting, forward and sampling together. A gain is the extra time that plain
    decoding would have taken for the same tokens.
    """

    predicted_ms: float  # the step as it was run
    plain_ms: float  # the same step without drafts
    decode_ms: float  # a plain step of the sampling requests alone: one token each
    predicted_gain_ms: float


@dataclass(kw_only=True, slots=True)
class StepResult:
    """One step's results for all entries."""

    entries: list[EntryResult]  # worker, parallel to Batch.entries
    weight_version: int  # worker: of the weights that sampled
    num_query_tokens: int = 0  # worker: T, draft nodes included
    num_proposed: int = 0  # worker: draft nodes, verified or not
    expected_accepted: float = 0.0  # worker: draft nodes, by the proposers' own estimates
    forecast: StepForecast | None = None  # worker; None while nothing is known
    times: StepTimes = field(default_factory=StepTimes)
