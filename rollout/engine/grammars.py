"""Grammars that outputs obey, by llguidance: compiled once, followed by each request by itself."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import InvalidInputError
from rollout.types import Request, SamplingParams

_MAX_COMPILED = 64  # grammars that are remembered: compiling a large one takes a second
# All requests wait while a grammar is compiled, for a time that grows with the square of these.
_MAX_CHARACTERS = 1 << 16
_MAX_MULTIPLE = 1 << 16  # the least common multiple of a schema's `multipleOf`, as if all met


class Grammars:
    """Compiles grammars for one tokenizer, and remembers the last ones."""

    def __init__(
        self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def open(self, params: SamplingParams, partial: Sequence[int]) -> TokenGrammar | None:
        """The grammar of one request, at its beginning; None where it has none.

        Raises InvalidInputError for what is no grammar, and for ``partial``, tokens emitted before,
        that do not obey it.
        """
        for kind in ("json_schema", "regex"):
            text = getattr(params, kind)
            if text is not None:
                matcher = self._matcher(kind, text).deep_copy()
                if matcher.validate_tokens(list(partial)) < len(partial):
                    raise InvalidInputError(
                        "partial_ids", partial, f"must obey the request's {kind}"
                    )
                return TokenGrammar(matcher, self._vocab_size)
        return None

    def _matcher(self, kind: str, text: str) -> Any:
        key = (kind, text)
        if key not in self._compiled:
            self._compiled[key] = self._compile(kind, text)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def _compile(self, kind: str, text: str) -> Any:
        tokens = self._tokens(kind, text)
        _check_compile_time(kind, text)
        from llguidance import LLMatcher

        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text)
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


def _check_compile_time(kind: str, text: str) -> None:
    """Raise InvalidInputError for a grammar whose compilation would take more than seconds."""
    field = f"sampling.{kind}"
    if len(text) > _MAX_CHARACTERS:
        remedy = f"must be of at most {_MAX_CHARACTERS}, for all requests wait for its compilation"
        raise InvalidInputError(field, f"{len(text)} characters", remedy)
    if kind != "json_schema":
        return
    if math.lcm(*map(_without_point, _multiples(text))) > _MAX_MULTIPLE:
        remedy = (
            "the numbers of multipleOf, without decimal points, must have a common multiple of at "
            f"most {_MAX_MULTIPLE}, for all requests wait for its compilation"
        )
        raise InvalidInputError(field, text, remedy)


def _without_point(number: Decimal) -> int:
    """The number without its decimal point; one that is too large in place of any such."""
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


class TokenGrammar:
    """Where one request's output stands in its grammar: a function of its tokens alone."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_read = 0  # tokens of the output

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens that must not follow the request's own and ``drafted`` ones, ascending.

        None are where ``drafted`` breaks the grammar already: nothing is emitted there.
        """
        matcher = self._matcher
        output_start = request.prompt_len - request.partial_len
        new = request.tokens[output_start + self._num_read :]
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
