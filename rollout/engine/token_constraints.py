"""Tokens that a request may not emit: those off a list of its own, and those that end a bad word.

Grammars are in `grammars`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.types import Request

Encode = Callable[[str], list[int]]


class AllowedTokens:
    """Forbids every token that is not on a request's list."""

    def __init__(self, allowed_token_ids: Sequence[int], vocab_size: int) -> None:
        is_forbidden_V = np.ones(vocab_size, dtype=np.bool_)
        is_forbidden_V[allowed_token_ids] = False
        self._forbidden_X = np.flatnonzero(is_forbidden_V)

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens off the list, ascending; the same after any output."""
        return self._forbidden_X


class BadWords:
    """Forbids the last token of a bad word after its others.

    A word is known by its tokens, at the beginning of a text and after a space, as in vLLM: a text
    that spells it with other tokens is not noticed. Only the output counts.
    """

    def __init__(self, bad_words: Sequence[str], encode: Encode) -> None:
        self._words = [ids for word in bad_words for ids in _spellings(word, encode)]
        self._window = max(map(len, self._words), default=1) - 1

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens that would complete a word, ascending."""
        first = max(request.prompt_len - request.partial_len, len(request.tokens) - self._window)
        before = [*request.tokens[first:], *drafted]
        completing = {
            ids[-1] for ids in self._words if before[len(before) - len(ids) + 1 :] == ids[:-1]
        }
        return np.array(sorted(completing), dtype=np.int64)


def _spellings(word: str, encode: Encode) -> list[list[int]]:
    """The word's tokens at the beginning of a text, and inside a text if they are equally many."""
    first, inside = encode(word.lstrip()), encode(" " + word.lstrip())
    found = [first] if first else []
    if inside and inside != first and len(inside) == len(first):
        found.append(inside)
    return found
