"""A lower bound on how many tokens a text takes, known before it is encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType
from typing import Any, Self


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, the other bytes for
    the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF_CHARACTER: Mapping[str, int] = MappingProxyType(_byte_of_character())


_COMPOSED = 8
"""Bytes that NFC or NFKC may turn into one: a character of two bytes or more is composed of at most
four characters of at most four bytes each, one of a single byte of one."""


@dataclass(frozen=True, slots=True)
class MinTokenCount:
    """The bound for BPE over bytes (Radford et al. 2019), or with byte fallback (Kudo and
    Richardson 2018)."""

    longest: int  # bytes of UTF-8 that one token can stand for
    dropped: bytes = b""  # bytes that have no token

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """The bound of a transformers tokenizer.

        None where no bound is known: vocabularies with one token for whatever they lack, tokens
        that take blanks along, steps that drop what they meet.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        described = json.loads(backend.to_str())
        model, added = described["model"], described["added_tokens"]
        shrinks = _shrinks(described["normalizer"])
        parts = _parts(described["pre_tokenizer"], "pretokenizers")
        takes_blanks = any(token["lstrip"] or token["rstrip"] for token in added)
        if shrinks is None or takes_blanks or model["type"] != "BPE" or not all(map(_keeps, parts)):
            return None
        vocab: Mapping[str, int] = model["vocab"]
        if any(part["type"] == "ByteLevel" for part in parts):
            longest = max(map(len, vocab))  # a letter of it is a byte
            dropped = bytes(byte for name, byte in BYTE_OF_CHARACTER.items() if name not in vocab)
            if dropped and (shrinks != 1 or model["unk_token"] is not None):
                return None
        elif model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
            longest, dropped = max(len(piece.encode()) for piece in vocab), b""
        else:
            return None
        longest = max(longest, *(len(token["content"].encode()) for token in added), 1)
        return cls(shrinks * longest, dropped)

    def min_tokens(self, text: str) -> int:
        """The least number of tokens of a text. Raises UnicodeEncodeError for half of a surrogate
        pair."""
        return ceil(len(text.encode().translate(None, self.dropped)) / self.longest)


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """The most bytes that a normalizer turns into one; None if there is no limit."""
    factors = [_shrinks_alone(part) for part in _parts(normalizer, "normalizers")]
    return None if None in factors else prod(factor or 1 for factor in factors)


def _shrinks_alone(normalizer: dict[str, Any]) -> int | None:
    match normalizer:
        case {"type": "Prepend"}:
            return 1
        case {"type": "NFC" | "NFKC"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return 1 if len(content.encode()) >= len(pattern.encode()) else None
    return None


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all of the text."""
    match pre_tokenizer:
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
    return False


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's step: none, one, or a sequence of them."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for each in step[name] for part in _parts(each, name)]
