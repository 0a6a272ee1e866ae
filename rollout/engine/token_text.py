"""Text from tokens as they come: what later tokens may still change, and what they cannot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

_CONTEXT = 8  # tokens; see TokenText
_LONGEST = 3 * _CONTEXT
_CUT_CHARACTER = 3  # characters that one without its first byte may become
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_BEGUN = 4  # characters of " n '", which clean-up makes into n't when a t follows


class Detokenizer:
    """Tells which text later tokens may still change. One serves any number of texts.

    Three things may change, at the end of the text alone. A character of several tokens is U+FFFD
    until its last byte has come. Byte tokens (``<0xE4>``) are judged as a run, once it has ended:
    one invalid byte spoils the characters before it. Clean-up takes the space from before
    punctuation.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer.
            shown_ids: special tokens that are not skipped.
        """
        self._tokenizer = tokenizer
        self.skips_all = skip_special_tokens and not shown_ids
        self._hidden_ids: set[int] = set()
        if skip_special_tokens and shown_ids:
            added = tokenizer.added_tokens_decoder.items()
            self._hidden_ids = {id for id, token in added if token.special} - shown_ids
        self._cleans_up = bool(tokenizer.clean_up_tokenization_spaces)
        self.byte_ids = frozenset(_byte_ids(tokenizer))
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.silent_ids = frozenset(id for id in special if self._is_silent(id))
        """Tokens without text of their own: a run of byte tokens goes on across them."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, as later ones may still change it."""
        ids = [id for id in token_ids if id not in self._hidden_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=self.skips_all)

    def uncertain_len(self, text: str) -> int:
        """How many characters at the end of ``text`` may change; it does not end in a byte token.

        An unfinished character is the last one alone: decoders replace the longest part that could
        begin a character by one U+FFFD, and what comes before it is decided.
        """
        if text.endswith(_REPLACEMENT):
            return 1
        if not self._cleans_up:
            return 0
        tail = text[-_LONGEST_BEGUN:]  # what clean-up replaces begins with a space
        space = tail.find(" ")
        return 0 if space < 0 else len(tail) - space

    def _is_silent(self, token_id: int) -> bool:
        spelled = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return spelled != "" and self.decode([token_id]) == ""


def _byte_ids(tokenizer: Any) -> list[int]:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(names)
    known = [(id, name) for id, name in zip(ids, names, strict=True) if id is not None]
    spelled = tokenizer.convert_ids_to_tokens([id for id, _ in known])
    return [id for (id, name), itself in zip(known, spelled, strict=True) if itself == name]


class TokenText:
    """The certain text of a growing sequence: each `push` gives what the new tokens made certain.

    The cost of a token does not depend on how many came before: only the last few are decoded. What
    a token adds is the same after any text, but for how that text begins (a decoder may strip its
    first space, or meet the second half of a character). So both sides of a comparison begin at
    the same token, at least _CONTEXT before the first that is still uncertain.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._window: list[int] = []
        self._given_len = 0  # characters of the window's text

    def push(self, token_ids: Sequence[int]) -> str:
        detokenizer = self._detokenizer
        new_ids = [id for id in token_ids if id not in detokenizer.silent_ids]
        self._window += new_ids
        if not new_ids or self._window[-1] in detokenizer.byte_ids:
            return ""
        text = detokenizer.decode(self._window)
        certain_len = len(text) - detokenizer.uncertain_len(text)
        certain = text[self._given_len : certain_len]
        self._given_len = max(self._given_len, certain_len)
        if len(self._window) > _LONGEST:
            self._shorten(text)
        return certain

    @property
    def uncertain(self) -> str:
        """The text behind what was given, as later tokens may still change it."""
        return self._detokenizer.decode(self._window)[self._given_len :]

    def copy(self) -> Self:
        """The same text, which grows by itself."""
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def _shorten(self, text: str) -> None:
        """``text``: the window's. Uncertain characters are of its last three tokens at most."""
        byte_ids = self._detokenizer.byte_ids
        start = len(self._window) - _CONTEXT
        while start > 0 and {self._window[start - 1], self._window[start]} <= byte_ids:
            start -= 1  # a run is judged as a whole
        window = self._window[start:]
        shorter = self._detokenizer.decode(window)
        given_len = len(shorter) - (len(text) - self._given_len)
        # They differ at the beginning alone, unless clean-up takes spaces from a run of quotes, of
        # which it takes every other one: then the run's beginning has to stay.
        if given_len > 0 and text.endswith(shorter[_CUT_CHARACTER:]):
            self._window, self._given_len = window, given_len
