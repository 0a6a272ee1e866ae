"""Grammars that outputs obey, by llguidance: compiled once, followed by each request by itself."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.stopping import max_tokens_of
from rollout.errors import InvalidInputError
from rollout.types import Request, SamplingParams

_MAX_COMPILED = 64  # grammars that are remembered: compiling a large one takes a second
# The time that a grammar takes to be compiled grows with the square of these; requests may wait.
_MAX_CHARACTERS = 1 << 16
_MAX_MULTIPLE = 1 << 16  # the least common multiple of a schema's `multipleOf`, as if all met


class Grammars:
    def __init__(
        self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()  # of those; none is held while a grammar is compiled

    def compile(self, params: SamplingParams) -> None:
        """Compile the grammar of parameters, so that `open` is quick. On any thread. Raises
        InvalidInputError for what is no grammar."""
        if (grammar := _grammar_of(params)) is not None:
            self._matcher(*grammar)

    def open(self, params: SamplingParams, partial: Sequence[int]) -> TokenGrammar | None:
        """The grammar of one request, at its beginning; None where it has none.

        Raises InvalidInputError for what is no grammar, and for ``partial``, tokens emitted before,
        that do not obey it.
        """
        if (grammar := _grammar_of(params)) is None:
            return None
        kind, text = grammar
        matcher = self._matcher(kind, text).deep_copy()
        beginning = None
        if params.grammar_after is not None:
            beginning = _EndOfText(params.grammar_after, self._tokenizer)
        begin = 0 if beginning is None else beginning.find(partial, 0)
        under = [] if begin is None else list(partial[begin:])
        if matcher.validate_tokens(under) < len(under):
            raise InvalidInputError("partial_ids", partial, f"must obey the request's {kind}")
        return TokenGrammar(matcher, self._vocab_size, beginning)

    def _matcher(self, kind: str, text: str) -> Any:
        key = (kind, text)
        with self._lock:
            matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._compile(kind, text)
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, kind: str, text: str) -> Any:
        tokens = self._tokens(kind, text)
        _check_compile_time(kind, text)
        from llguidance import LLMatcher

        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text)
            elif kind == "ebnf":
                grammar = LLMatcher.grammar_from_lark(_lark(text))
            else:
                grammar = LLMatcher.grammar_from_regex(text)
        except ValueError as error:
            raise InvalidInputError(f"sampling.{kind}", text, f"is none: {error}") from None
        matcher = LLMatcher(tokens, grammar, log_level=0)
        matcher.compute_bitmask()  # finds what no text obeys
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            raise InvalidInputError(f"sampling.{kind}", text, f"is none: {reason}")
        return matcher

    def _tokens(self, kind: str, text: str) -> Any:
        """llguidance's tokenizer."""
        remedy = None
        if self._tokenizer is None:
            remedy = "needs a tokenizer, which the model folder does not have"
        elif not self._eos_token_ids:
            remedy = "needs a model with an end-of-sequence token"
        if remedy is None:
            try:
                return self._llguidance_tokenizer
            except ImportError:
                remedy = "needs llguidance: pip install 'specrollout[grammar]'"
            except ValueError as error:
                remedy = f"needs a tokenizer that llguidance can read: {error}"
        raise InvalidInputError(f"sampling.{kind}", text, remedy)

    @cached_property
    def _llguidance_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(
            self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


def _lark(text: str) -> str:
    """A grammar in GBNF or Lark as Lark. Raises ValueError for what is neither."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # its errors have no class in common, RecursionError among them
        raise ValueError(str(error)) from None


def _grammar_of(params: SamplingParams) -> tuple[str, str] | None:
    """The kind of grammar that parameters name, and its text; None where they name none."""
    if params.json_schema is not None:
        return "json_schema", params.json_schema
    if params.ebnf is not None:
        return "ebnf", params.ebnf
    return None if params.regex is None else ("regex", params.regex)


def _check_compile_time(kind: str, text: str) -> None:
    """Raise InvalidInputError for a grammar whose compilation would take more than seconds."""
    field = f"sampling.{kind}"
    if len(text) > _MAX_CHARACTERS:
        remedy = f"must be of at most {_MAX_CHARACTERS}: it would take too long to be compiled"
        raise InvalidInputError(field, f"{len(text)} characters", remedy)
    if kind != "json_schema":
        return
    if math.lcm(*map(_without_point, _multiples(text))) > _MAX_MULTIPLE:
        remedy = (
            "the numbers of multipleOf, without decimal points, must have a common multiple of at "
            f"most {_MAX_MULTIPLE}: it would take too long to be compiled"
        )
        raise InvalidInputError(field, text, remedy)


def _without_point(number: Decimal) -> int:
    """The number without its decimal point, or ``_MAX_MULTIPLE + 1`` where it is too large."""
    digits = "".join(map(str, number.as_tuple().digits))
    num_zeros = max(0, number.adjusted() + 1 - len(digits))  # after them, before the point
    if len(digits) + num_zeros > len(str(_MAX_MULTIPLE)):
        return _MAX_MULTIPLE + 1
    return int(digits) * 10**num_zeros or 1


def _multiples(text: str) -> Iterator[Decimal]:
    """The numbers of all `multipleOf` of a schema; none of what is no JSON."""
    unread: list[Any] = []
    with suppress(ValueError, RecursionError, ArithmeticError):  # the compiler says what is wrong
        unread.append(json.loads(text, parse_int=Decimal, parse_float=Decimal))
    while unread:
        value = unread.pop()
        if isinstance(value, dict):
            if isinstance(multiple := value.get("multipleOf"), Decimal):
                yield multiple
            unread.extend(value.values())
        elif isinstance(value, list):
            unread.extend(value)


class _EndOfText:
    """Finds the token that completes a text for the first time."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._window = max_tokens_of([text])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        self._id = ids[0] if len(ids) == 1 else None  # a special token, in most vocabularies

    def find(self, tokens: Sequence[int], first: int) -> int | None:
        """The position behind the completing token, at least ``first``; None until it has come."""
        for end in range(first + 1, len(tokens) + 1):
            if tokens[end - 1] == self._id or self._ends_in(
                tokens[max(0, end - self._window) : end]
            ):
                return end
        return None

    def _ends_in(self, tokens: Sequence[int]) -> bool:
        if self._id is not None:
            return False
        return self._text in self._tokenizer.decode(list(tokens), skip_special_tokens=False)


class TokenGrammar:
    """The state of one request's output in its grammar: a function of its tokens alone."""

    def __init__(self, matcher: Any, vocab_size: int, beginning: _EndOfText | None = None) -> None:
        """``beginning``: of what the grammar holds for; None: it is the whole output."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._beginning = beginning
        self._num_free = 0  # tokens before that, as far as they were looked at
        self._num_read = 0  # tokens of the output

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens that must not follow the request's own and ``drafted`` ones, ascending.

        None are where ``drafted`` breaks the grammar already: nothing is emitted there.
        """
        matcher = self._matcher
        output_start = request.prompt_len - request.partial_len
        if self._beginning is not None:
            output = request.tokens[output_start:]
            begin = self._beginning.find(output, self._num_free)
            self._num_free = len(output)
            if begin is None:
                begin = self._beginning.find([*output, *drafted], len(output))
                if begin is None:
                    return np.empty(0, dtype=np.int64)
                drafted = drafted[begin - len(output) :]  # what is before it is not committed
            else:
                self._beginning, self._num_read = None, begin
        new = [] if self._beginning is not None else request.tokens[output_start + self._num_read :]
        if new:
            matcher.consume_tokens(new)
            self._num_read += len(new)
        num_followed = matcher.try_consume_tokens(drafted) if drafted else 0
        allowed_V = np.zeros(self._vocab_size, dtype=np.bool_)
        if num_followed < len(drafted):
            allowed_V[:] = True
        elif not matcher.is_error():
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            if not matcher.is_error():  # it has become too complex: then the request fails alone
                allowed_V[: len(found)] = found
        if num_followed:
            matcher.rollback(num_followed)
        return np.flatnonzero(~allowed_V)
