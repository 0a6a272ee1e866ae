"""The parameters of sampling a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from rollout.errors import InvalidInputError
from rollout.validation import did_you_mean

T = TypeVar("T")

_MIN_FLOAT, _LARGEST_FLOAT = (float(x) for x in (np.finfo("f4").tiny, np.finfo("f4").max))
"""Logits are transformed in float32, so parameters must fit it."""


def _names_unknown_fields(kind: type[T]) -> type[T]:
    """A dataclass that refuses unknown names as it refuses wrong values, with the name meant."""
    init = kind.__init__
    known = inspect.signature(kind).parameters

    @wraps(init)
    def checked_init(self: T, **given: Any) -> None:
        for name in given.keys() - known:
            hint = did_you_mean(name, known)
            raise InvalidInputError(f"sampling.{name}", given[name], f"no such parameter{hint}")
        init(self, **given)

    setattr(kind, "__init__", checked_init)  # noqa: B010
    return kind


@_names_unknown_fields
@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """The parameters of sampling a prompt. Checked when made; never changed afterwards.

    Order of the transforms: penalties and bias, temperature, top_k, top_p over what top_k left,
    min_p relative to the most likely token.

    Args:
        temperature: 0 is greedy, with the logprobs of temperature 1.
        top_k: draw from so many most likely tokens; -1 and 0: off.
        top_p: draw from the fewest most likely tokens whose probabilities add up to it; 1: off.
        min_p: draw from tokens at least so likely, relative to the most likely one; 0: off.
        repetition_penalty: over prompt and output, as in CTRL (Keskar et al. 2019); 1: off.
        presence_penalty: subtracted from the logit of each token that the output has; 0: off.
        frequency_penalty: subtracted once for each time that the output has the token; 0: off.
        logit_bias: added to logits, by token id.
        allowed_token_ids: other tokens are not drawn; None: all may be.
        bad_words: texts whose last token is not drawn.
        stop: texts that end the output. They are cut from its text, and their tokens stay.
        stop_regex: patterns, in RE2's syntax, that end the output where its text ends in a match.
            The match stays in the text.
        stop_token_ids: tokens that end the output, beside the model's own. Those beyond the
            vocabulary never come.
        ignore_eos: the model's own end tokens do not end it.
        min_new_tokens: nothing ends it before.
        max_new_tokens: the longest output in tokens.
        seed: of the run: request seeds derive from (seed, prompt index, sample index).
        n: samples per prompt.
        raw_logprobs: also give the model's own logprobs, at temperature 1.
        sampling_logprobs: also those renormalised over what truncation left.
        sampling_mask: also the tokens that truncation left.
        top_logprobs: also so many most likely tokens with their logprobs.
        logprob_token_ids: also the logprobs of these tokens.
        entropy: also the entropy of the distribution of the logprobs, in nats.
        routed_experts: also the experts of each token; needs model.record_routes.
        json_schema: a JSON schema as text: the output is JSON that obeys it.
        regex: the whole output matches it.
        ebnf: a grammar in GBNF or Lark that the output obeys.
        grammar_after: the grammar begins after this text, as after reasoning.

    Raises InvalidInputError for an unknown name or a wrong value.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    stop_regex: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    min_new_tokens: int = 0
    max_new_tokens: int = 256
    seed: int = 0
    n: int = 1
    raw_logprobs: bool = False
    sampling_logprobs: bool = False
    sampling_mask: bool = False
    top_logprobs: int = 0
    logprob_token_ids: list[int] = field(default_factory=list)
    entropy: bool = False
    routed_experts: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar_after: str | None = None

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
        for name in ("stop", "stop_regex", "bad_words"):
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
        for name in ("json_schema", "regex", "ebnf"):
            given = getattr(self, name)
            require(name, given is None or isinstance(given, str), "must be text")
        after = self.grammar_after
        require("grammar_after", after is None or (isinstance(after, str) and after != ""),
                "must be text, or None: the grammar holds from the first token")  # fmt: skip
        require("grammar_after", after is None or self.has_grammar, "needs a grammar")
        require("regex", None in (self.regex, self.json_schema), "excludes json_schema")
        require("ebnf", self.ebnf is None or self.regex is self.json_schema is None,
                "excludes json_schema and regex")  # fmt: skip
        for name in ("ignore_eos", "min_new_tokens"):
            require(name, not (self.has_grammar and getattr(self, name)),
                    "excludes grammars, which say where outputs end")  # fmt: skip

    @property
    def has_grammar(self) -> bool:
        """Whether the output must obey a grammar."""
        return not (self.json_schema is self.regex is self.ebnf is None)

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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return False
    return bool(-_LARGEST_FLOAT <= value <= _LARGEST_FLOAT)
