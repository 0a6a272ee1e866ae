"""The data types that all parts share: parameters, requests, batches, steps and rollouts.

The comment beside a field says who fills it, and when.

Shape legend: B entries of a batch, T query rows of a step, N draft nodes of a step, V vocabulary.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.errors import InvalidInputError

MAX_TREE_NODES = 64
"""Nodes of one draft tree, root included: an ancestor mask is one 64-bit word."""

ChatMessages = list[dict[str, str]]
Prompt = str | Sequence[int] | ChatMessages


_MIN_FLOAT, _LARGEST_FLOAT = (float(x) for x in (np.finfo("f4").tiny, np.finfo("f4").max))
"""Logits are transformed in float32, so parameters must fit it."""


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return False
    return bool(-_LARGEST_FLOAT <= value <= _LARGEST_FLOAT)


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # its logits were not finite; the rollout's `error` says more


class PauseMode(enum.StrEnum):
    """The treatment of requests in flight while generation is paused."""

    ABORT = "abort"  # they end with the tokens they have
    RETRACT = "retract"  # running ones return to the waiting queue and recompute their KV
    IN_PLACE = "in_place"  # they keep their KV and continue


class MemoryTag(enum.StrEnum):
    """Parts of an engine's memory that can be released separately."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "graphs"  # captured CUDA graphs


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """The parameters of sampling a prompt. Checked when made; never changed afterwards.

    Order of the transforms: penalties and bias, temperature, top_k, top_p over what top_k left,
    min_p relative to the most likely token. ``temperature == 0`` is greedy, with the logprobs of
    temperature 1.
    """

    temperature: float = 1.0
    top_k: int = -1  # -1 and 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in CTRL (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None  # others are not drawn; None: all
    bad_words: list[str] = field(default_factory=list)  # texts whose last token is not drawn
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    min_new_tokens: int = 0
    max_new_tokens: int = 256
    seed: int = 0  # the run seed: request seeds derive from (seed, prompt index, sample index)
    n: int = 1
    raw_logprobs: bool = False  # also the model's own, at temperature 1
    sampling_logprobs: bool = False  # also those renormalised over what truncation left
    sampling_mask: bool = False  # also the tokens that truncation left
    top_logprobs: int = 0  # this many most likely tokens with their logprobs
    logprob_token_ids: list[int] = field(default_factory=list)  # also the logprobs of these tokens
    entropy: bool = False  # also the entropy of the distribution of `logprobs`, in nats
    routed_experts: bool = False  # also the experts of each token; needs model.record_routes
    json_schema: str | None = None  # in JSON: the output is JSON that obeys it
    regex: str | None = None  # the whole output matches it
    grammar_after: str | None = None  # those hold for what follows this text, as after reasoning

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, remedy: str) -> None:
            if not ok:
                raise InvalidInputError(f"sampling.{name}", getattr(self, name), remedy)

        def finite(name: str) -> bool:
            return _is_finite(getattr(self, name))

        for name in ("top_k", "min_new_tokens", "max_new_tokens", "seed", "n", "top_logprobs"):
            require(name, _is_integer(getattr(self, name)), "must be an integer")
        for name in (
            "ignore_eos",
            "raw_logprobs",
            "sampling_logprobs",
            "sampling_mask",
            "entropy",
            "routed_experts",
        ):
            require(
                name, isinstance(getattr(self, name), (bool, np.bool_)), "must be True or False"
            )
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            require(name, isinstance(texts, (list, tuple))
                    and all(isinstance(text, str) and text for text in texts),
                    "must be a list of strings, none of them empty")  # fmt: skip
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            require(name, (ids is None and name == "allowed_token_ids")
                    or (isinstance(ids, (list, tuple)) and all(map(_is_integer, ids))),
                    "must be a list of integers")  # fmt: skip
        require("allowed_token_ids", self.allowed_token_ids is None or bool(self.allowed_token_ids),
                "must name at least one token, or be None for all")  # fmt: skip
        require("logit_bias", isinstance(self.logit_bias, Mapping)
                and all(map(_is_integer, self.logit_bias))
                and all(map(_is_finite, self.logit_bias.values())),
                "must map token ids to finite numbers")  # fmt: skip
        require("temperature", finite("temperature") and self.temperature >= 0,
                "must be a finite number >= 0 (0 is greedy)")  # fmt: skip
        require("top_k", -1 <= self.top_k < 2**31,
                "must be >= 1 and fit 32 bits, or -1 or 0 for off")  # fmt: skip
        require("top_p", finite("top_p") and _MIN_FLOAT <= self.top_p <= 1,
                "must be in (0, 1]; 1 is off")  # fmt: skip
        require("min_p", finite("min_p") and 0 <= self.min_p < 1, "must be in [0, 1); 0 is off")
        require("repetition_penalty", finite("repetition_penalty") and self.repetition_penalty > 0,
                "must be a finite number > 0; 1 is off")  # fmt: skip
        require("presence_penalty", finite("presence_penalty"), "must be finite; 0 is off")
        require("frequency_penalty", finite("frequency_penalty"), "must be finite; 0 is off")
        require("max_new_tokens", self.max_new_tokens >= 1, "must be >= 1")
        require("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens,
                f"must be in [0, max_new_tokens={self.max_new_tokens}]")  # fmt: skip
        require("seed", -(2**63) <= self.seed < 2**64, "must fit 64 bits")
        require("n", self.n >= 1, "must be >= 1 samples per prompt")
        require("top_logprobs", 0 <= self.top_logprobs <= 100, "must be in [0, 100]")
        require("sampling_mask", not self.sampling_mask or self.truncates,
                "needs top_k, top_p or min_p: without them nothing is cut")  # fmt: skip
        for name in ("json_schema", "regex"):
            given = getattr(self, name)
            require(name, given is None or isinstance(given, str), "must be text")
        after = self.grammar_after
        require("grammar_after", after is None or (isinstance(after, str) and after != ""),
                "must be text, or None: the grammar holds from the first token")  # fmt: skip
        require("grammar_after", after is None or self.has_grammar, "needs json_schema or regex")
        require("regex", None in (self.regex, self.json_schema), "excludes json_schema")
        for name in ("ignore_eos", "min_new_tokens"):
            require(name, not (self.has_grammar and getattr(self, name)),
                    "excludes json_schema and regex, which say where outputs end")  # fmt: skip

    @property
    def has_grammar(self) -> bool:
        """Whether the output must obey a grammar."""
        return self.json_schema is not None or self.regex is not None

    @property
    def forbids(self) -> bool:
        """Whether tokens are kept from being drawn that truncation may leave."""
        return (
            self.min_new_tokens > 0
            or self.has_grammar
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
        )

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether a penalty changes logits. A logit_bias is not one."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def wants_extras(self) -> bool:
        """Whether numbers beside `logprobs` are asked for: see TokenExtras."""
        return bool(
            self.raw_logprobs
            or self.sampling_logprobs
            or self.sampling_mask
            or self.top_logprobs
            or self.logprob_token_ids
            or self.entropy
        )


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
    predicted_ms: float = 0.0  # its share of its whole steps by the cost curve, by query rows
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


NO_EXTRAS = TokenExtras()
"""The extras of requests that asked for none. Shared: never written to."""


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


class TokenConstraint(Protocol):
    """Says which tokens a request may emit: a grammar, a list of tokens, words to be left out.

    Made by the engine, asked by the sampler.
    """

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens that must not follow the request's own and ``drafted`` ones, ascending.

        A pure function of those, since a step that failed asks again.
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


@dataclass(kw_only=True, slots=True)
class ScheduledStates:
    """State slots of one entry: the state it begins with, and slots for those the step computes.

    The step never writes to the source. Commit gives the request the slot of the last accepted
    node, and frees the source and the others.
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

    def __post_init__(self) -> None:
        self.num_run_tokens = sum([entry.run_len for entry in self.entries])


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
    draft: float = 0.0  # worker: propose and observe
    forward: float = 0.0  # worker: hidden states and logits
    sample: float = 0.0  # worker: sampling, acceptance, commit
    waited: float = 0.0  # worker: part of the others in which the host waited for the device
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


@dataclass(kw_only=True, slots=True)
class Rollout(EmittedTokens):
    """A finished request, with all the tokens that it emitted."""

    request_id: int
    prompt_index: int
    sample_index: int
    seed: int  # the request seed; pass it to submit() to continue a rollout that was cut
    prompt_ids: list[int]
    finish_reason: FinishReason
    text: str | None  # None where the engine has no tokenizer
    stats: RequestStats
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
