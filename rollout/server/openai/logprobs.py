"""Logprobs in the two shapes OpenAI gave them, and how their tokens are written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.engine.min_token_count import BYTE_OF_CHARACTER
from rollout.engine.token_text import Detokenizer, TokenText
from rollout.types import EmittedTokens, TokenExtras

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenSpelling:
    """A token's text and bytes. What was asked once is remembered: as much as the vocabulary."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer: Any = tokenizer
        self._known: dict[int, str] = {}
        # Decoders may strip the start of a text, so a token is read after another one.
        self._before: list[int] = []
        if tokenizer is not None:
            self._before = tokenizer("a", add_special_tokens=False)["input_ids"]
            self._before_len = len(self._decode([]))

    def text(self, token_id: int) -> str:
        """The token as it reads inside a text; special tokens by their names. U+FFFD stands for
        what is not a whole character. Without a tokenizer: ``token_id:ID``."""
        if self._tokenizer is None:
            return by_id(token_id)
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._decode([token_id])[self._before_len :]
        return text

    def bytes(self, token_id: int) -> list[int]:
        """The token's bytes: all tokens' one after the other are the text's, parts of characters
        too."""
        text = self.text(token_id)
        if "\N{REPLACEMENT CHARACTER}" in text:
            spelled = self._tokenizer.convert_ids_to_tokens(token_id)
            if match := _BYTE_TOKEN.fullmatch(spelled):
                return [int(match[1], 16)]
            if all(character in BYTE_OF_CHARACTER for character in spelled):
                return [BYTE_OF_CHARACTER[character] for character in spelled]
        return list(text.encode())

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode([*self._before, *token_ids], skip_special_tokens=False)


def by_id(token_id: int) -> str:
    """vLLM's way to write a token that needs no tokenizer to read."""
    return f"token_id:{token_id}"


_LEAST = -9999.0  # JSON has no -inf; OpenAI's and vLLM's word for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Tokens with their logprobs, None where nothing comes before the token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    tops: Sequence[
        Sequence[tuple[int, float]]
    ]  # the most likely tokens there, then those asked for

    @classmethod
    def of(cls, generated: EmittedTokens) -> ScoredTokens:
        """The tokens that were generated."""
        return cls(
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            tops=tops_of(generated.extras, len(generated.token_ids)),
        )

    def then(self, others: ScoredTokens) -> ScoredTokens:
        return ScoredTokens(
            token_ids=[*self.token_ids, *others.token_ids],
            logprobs=[*self.logprobs, *others.logprobs],
            tops=[*self.tops, *others.tops],
        )

    def __iter__(self) -> Iterator[tuple[int, float | None, Sequence[tuple[int, float]]]]:
        return zip(self.token_ids, self.logprobs, self.tops, strict=True)


def tops_of(extras: TokenExtras, count: int) -> Sequence[Sequence[tuple[int, float]]]:
    """The logprobs at each of ``count`` positions beside the token's own."""
    tops = extras.top_logprobs or [[] for _ in range(count)]
    if not extras.token_ids_logprobs:
        return tops
    return [
        [*top, *(pair for pair in asked if pair not in top)]
        for top, asked in zip(tops, extras.token_ids_logprobs, strict=True)
    ]


NO_TOKENS = ScoredTokens(token_ids=(), logprobs=(), tops=())


class TextOffsets:
    """Offsets at which tokens begin in a growing text: each after the certain text before it."""

    def __init__(self, detokenizer: Detokenizer | None, start: int = 0) -> None:
        self._text = None if detokenizer is None else TokenText(detokenizer)
        self._end = start

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """The offset of each of the next tokens."""
        return [self._push_one(token) for token in token_ids]

    def _push_one(self, token_id: int) -> int:
        begin = self._end
        if self._text is not None:
            self._end += len(self._text.push([token_id]))
        return begin


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """``as_ids``: tokens are written as `token_id:ID`, which clients can decode themselves."""

    spelling: TokenSpelling
    as_ids: bool

    def of_completion(self, tokens: ScoredTokens, offsets: Sequence[int]) -> dict[str, Any]:
        """``offsets``: where in the text each token begins."""
        return {
            "tokens": [self._write(token) for token in tokens.token_ids],
            "token_logprobs": [json_number(logprob) for logprob in tokens.logprobs],
            "top_logprobs": [self._by_token(*each) for each in tokens],
            "text_offset": list(offsets),
        }

    def of_chat(self, tokens: ScoredTokens) -> dict[str, Any]:
        content = [
            {**self._entry(token, logprob), "top_logprobs": [self._entry(*top) for top in tops]}
            for token, logprob, tops in tokens
        ]
        return {"content": content, "refusal": None}

    @property
    def _write(self) -> Callable[[int], str]:
        return by_id if self.as_ids else self.spelling.text

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._write(token),
            "logprob": json_number(logprob),
            "bytes": self.spelling.bytes(token),
        }

    def _by_token(
        self, token: int, logprob: float | None, tops: Sequence[tuple[int, float]]
    ) -> dict[str, float] | None:
        """The token itself is always there, whatever else is written as it is."""
        if logprob is None:
            return None
        by_token: dict[str, float] = {}
        for each, its_logprob in [(token, logprob), *tops]:
            by_token.setdefault(self._write(each), json_number(its_logprob))
        return by_token


def json_number(logprob: float | None) -> Any:
    """The logprob as a number that JSON has."""
    return _LEAST if logprob is not None and math.isinf(logprob) else logprob
