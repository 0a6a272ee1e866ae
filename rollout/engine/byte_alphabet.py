"""The characters that byte-level vocabularies write bytes with (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _byte_of_character() -> dict[str, int]:
    """Printable ones of Latin-1 mean themselves, the other bytes are counted from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF_CHARACTER: Mapping[str, int] = MappingProxyType(_byte_of_character())
