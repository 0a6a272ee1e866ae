"""How one token is written in an answer."""

from __future__ import annotations

import re
from typing import Any

from rollout.engine.min_token_count import BYTE_OF_CHARACTER

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


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
        """As it reads inside a text; special tokens by their names. U+FFFD stands for what is not
        a whole character. Without a tokenizer: ``token_id:ID``."""
        if self._tokenizer is None:
            return by_id(token_id)
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._decode([token_id])[self._before_len :]
        return text

    def bytes(self, token_id: int) -> list[int]:
        """Those of all tokens, one after the other, are the text's, parts of characters too."""
        text = self.text(token_id)
        if "\N{REPLACEMENT CHARACTER}" in text:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            if match := _BYTE_PIECE.fullmatch(piece):
                return [int(match[1], 16)]
            if all(character in BYTE_OF_CHARACTER for character in piece):
                return [BYTE_OF_CHARACTER[character] for character in piece]
        return list(text.encode())

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode([*self._before, *token_ids], skip_special_tokens=False)


def by_id(token_id: int) -> str:
    """vLLM's way to write a token that needs no tokenizer to read."""
    return f"token_id:{token_id}"
