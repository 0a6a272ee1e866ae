"""Text from tokens as they come: what is shown stays, and half a stop string is never shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rollout.engine.token_text import Detokenizer, TokenText


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
