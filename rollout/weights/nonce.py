"""Which bucket is in a buffer that is filled again and again: a nonce in the buffer's header.

The sender zeroes it before it refills the buffer and stamps a new one when the bucket is complete;
a handle names the one it is for, and the receiver compares before and after it reads.
"""

from __future__ import annotations

import secrets

from rollout.checked import checked_hex
from rollout.errors import InvalidInputError, WeightUpdateError

NONCE_BYTES = 16
HEADER_BYTES = 64
"""The nonce, and room so that what follows is aligned as entries are."""

NO_BUCKET = bytes(NONCE_BYTES)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def checked_nonce(value: object, field: str) -> bytes:
    nonce = checked_hex(value, field)
    if len(nonce) != NONCE_BYTES or nonce == NO_BUCKET:
        raise InvalidInputError(field, value, f"must be {NONCE_BYTES} bytes, not zero")
    return nonce


def refuse_replaced(expected: bytes, found: bytes, field: str) -> None:
    """Before a bucket is read. Raises InvalidInputError."""
    if found != expected:
        raise InvalidInputError(
            f"{field}.nonce", expected.hex(),
            "is of a bucket that is no longer in its buffer: handles are valid until the sender is "
            "asked for the one that takes their place",
        )  # fmt: skip


def refuse_refilled(expected: bytes, found: bytes, buffer: str) -> None:
    """After a bucket was read. Raises WeightUpdateError."""
    if found != expected:
        raise WeightUpdateError(
            f"the sender refilled {buffer} while it was being read; it must ask for a handle only "
            "when the one whose place it takes has been loaded"
        )
