"""Text from tokens as they come: what is shown stays, and half a stop string is never shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

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


class TextStream:
    """The text of one sample that may be shown, as it grows.

    In the end all that was shown is the rollout's text, whatever tokens came in which steps. A stop
    string that is complete is held until more tokens come: then it was none (it came before
    ``min_new_tokens``).
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str] = ()) -> None:
        """``stop``: the request's stop strings. Without a detokenizer there is no text."""
        self._text = None if detokenizer is None else TokenText(detokenizer)
        self._stop = stop
        self._held = ""  # certain, but perhaps a stop string or the start of one
        self._shown_len = 0

    def push(self, token_ids: Sequence[int]) -> str:
        if self._text is None or not token_ids:
            return ""
        held_len = len(self._held)
        certain = self._held + self._text.push(token_ids)
        shown_len = min(
            (_stop_offset(certain, held_len, stop) for stop in self._stop), default=len(certain)
        )
        self._held = certain[shown_len:]
        self._shown_len += shown_len
        return certain[:shown_len]

    def finish(self, text: str | None) -> str:
        """The rest, given the text of the rollout."""
        return "" if text is None else text[self._shown_len :]


def _stop_offset(text: str, old_len: int, stop: str) -> int:
    """Start of a stop string that ends after ``old_len``, or that may have begun, or the end."""
    offset = text.find(stop, max(0, old_len - len(stop) + 1))
    if offset >= 0:
        return offset
    begun = range(min(len(text), len(stop) - 1), 0, -1)
    return len(text) - next((n for n in begun if text.endswith(stop[:n])), 0)


class TextStreams:
    """The streams of any number of texts, with special tokens or without. No tokenizer, no text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._detokenizers: dict[tuple[bool, frozenset[int]], Detokenizer] = {}
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._special_ids = {str(token): id for id, token in added.items() if token.special}

    def special_ids(self, texts: Collection[str]) -> frozenset[int]:
        """The special tokens that are written so."""
        return frozenset(self._special_ids[text] for text in texts if text in self._special_ids)

    def detokenizer(
        self, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
    ) -> Detokenizer | None:
        """The tokenizer's detokenizer; None without a tokenizer.

        ``shown_ids``: special tokens that are not skipped.
        """
        if self._tokenizer is None:
            return None
        key = (skip_special_tokens, shown_ids)
        if key not in self._detokenizers:
            self._detokenizers[key] = Detokenizer(self._tokenizer, *key)
        return self._detokenizers[key]

    def open(
        self,
        skip_special_tokens: bool,
        stop: Sequence[str],
        shown_ids: frozenset[int] = frozenset(),
    ) -> TextStream:
        """A new text; ``stop``: the request's stop strings."""
        return TextStream(self.detokenizer(skip_special_tokens, shown_ids), stop)
