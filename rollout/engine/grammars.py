"""Grammars that outputs obey, by llguidance: compiled once, followed by each request by itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import InvalidInputError
from rollout.types import Request, SamplingParams

_MAX_COMPILED = 64  # grammars that are remembered: compiling a large one takes a second


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
