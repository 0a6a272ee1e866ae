"""Regular expressions that end an output where its text ends in a match, by RE2: a search takes
time in proportion to the text, whatever the pattern."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Self

from rollout.engine.token_text import Detokenizer, TokenText
from rollout.errors import InvalidInputError
from rollout.types import SamplingParams

_MAX_BYTES = 8 << 20  # of memory for one pattern, as RE2 counts it
_MAX_INSTRUCTIONS = 512  # of RE2's programs: each may look at each character, at every token
_MAX_CHARACTERS = 1 << 13  # that are searched; a longer match ends nothing
_MAX_COMPILED = 64  # lists of patterns that are remembered

Compiled = Sequence[tuple[str, Any]]
"""Patterns, each with an expression that matches from a text's beginning to its last match's
end."""


class StopRegexes:
    """Compiles the patterns of requests. On any thread."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(_MAX_COMPILED)(_compile)

    def compile(self, params: SamplingParams) -> None:
        """Compile the patterns of parameters, so that `open` is quick. Raises InvalidInputError."""
        if params.stop_regex:
            self._compiled(tuple(params.stop_regex))

    def open(self, params: SamplingParams) -> StopRegex | None:
        """The patterns of one request; None where it has none. Raises InvalidInputError."""
        if not params.stop_regex:
            return None
        return StopRegex(self._compiled(tuple(params.stop_regex)), self._detokenizer)

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, skip_special_tokens=False)


class StopRegex:
    """The patterns of one request, and its text as far as tokens were committed."""

    def __init__(self, patterns: Compiled, detokenizer: Detokenizer) -> None:
        self._begin = OutputText(patterns, detokenizer)
        self._text = self._begin.copy()
        self._num_read = 0

    def read(self, output: Sequence[int]) -> OutputText:
        """The text of the committed tokens, for further ones to be tried on."""
        self._text.push(output[self._num_read :])
        self._num_read = len(output)
        return self._text.copy()

    def matched(self, output: Sequence[int]) -> str | None:
        """The pattern that the last token completes, if it completes one."""
        text = self._begin.copy()
        text.push(output[:-1])
        text.push(output[-1:])
        return text.completed()


class OutputText:
    """The last characters of an output, and which pattern they end in."""

    def __init__(self, patterns: Compiled, detokenizer: Detokenizer) -> None:
        self._patterns = patterns
        self._tokens = TokenText(detokenizer)
        self._certain = ""
        self._new_from = 0  # the first character that the last tokens brought or changed

    def push(self, token_ids: Sequence[int]) -> None:
        """Append the tokens that follow."""
        old_len = len(self._certain)
        text = self._certain + self._tokens.push(token_ids)
        self._certain = text[-_MAX_CHARACTERS:]
        self._new_from = max(0, old_len - len(text) + len(self._certain))

    def completed(self) -> str | None:
        """The first pattern with a match that ends in the text of the last tokens pushed."""
        text = self._certain + self._tokens.uncertain
        for pattern, expression in self._patterns:
            found = expression.match(text)
            if found is not None and found.end() > self._new_from:
                return pattern
        return None

    def copy(self) -> Self:
        """The same text, which grows by itself."""
        other = copy.copy(self)
        other._tokens = self._tokens.copy()
        return other


def _compile(patterns: tuple[str, ...]) -> Compiled:
    try:
        import re2
    except ImportError:
        raise InvalidInputError(
            "sampling.stop_regex", patterns, "needs google-re2: pip install 'specrollout[grammar]'"
        ) from None
    options = re2.Options()
    options.max_mem = _MAX_BYTES
    options.log_errors = False
    options.never_capture = True
    options.longest_match = True
    found = []
    num_instructions = 0
    for pattern in patterns:
        try:
            re2.compile(pattern, options)
            found.append((pattern, re2.compile(f"(?s:.*)(?:{pattern})", options)))
        except (re2.error, UnicodeEncodeError) as error:
            reason = error.args[0].decode() if isinstance(error, re2.error) else str(error)
            raise InvalidInputError(
                "sampling.stop_regex", pattern,
                f"is none for RE2, which knows no lookaround and no backreferences: {reason}",
            ) from None  # fmt: skip
        num_instructions += found[-1][1].programsize
        if num_instructions > _MAX_INSTRUCTIONS:
            raise InvalidInputError(
                "sampling.stop_regex", pattern,
                f"is too large: RE2 makes {num_instructions} instructions of the patterns up to "
                f"it, and at most {_MAX_INSTRUCTIONS} may be; ask for fewer repetitions",
            )  # fmt: skip
    return found
