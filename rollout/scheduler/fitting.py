"""Whether a prompt fits the context and the KV slots."""

from __future__ import annotations

from rollout.errors import InvalidInputError, OutOfMemoryError


def check_length(length: int, max_context_len: int, max_sequence_len: int, field: str) -> None:
    """Raise unless a prompt leaves room for at least one token when it runs alone.

    Args:
        length: the prompt's length in tokens.
        max_sequence_len: largest number of tokens, prompt and output, that the KV slots hold.
        field: the prompt's name in the error.

    Raises InvalidInputError if the context is too short, OutOfMemoryError if KV slots are too few.
    """
    if not 0 < length < max_context_len:
        remedy = f"must have 1 to {max_context_len - 1} tokens: the context is {max_context_len}"
        raise InvalidInputError(f"len({field})", length, remedy)
    if length >= max_sequence_len:
        raise OutOfMemoryError(
            f"{field} of {length} tokens needs {length + 1} KV slots and there are "
            f"{max_sequence_len}: raise memory.kv_bytes or memory.max_kv_tokens"
        )
