"""Limits of what one sample may ask of every token."""

from __future__ import annotations

from rollout.errors import InvalidInputError
from rollout.types import SamplingParams

_MAX_TEXTS = 64  # stop strings of a sample, and bad words
_LONGEST_TEXT = 1024  # characters
_MAX_LISTED_TOKENS = 1024


def check_params(params: SamplingParams, vocab_size: int, has_tokenizer: bool) -> None:
    """Raises InvalidInputError for parameters of which there are too many, or that the model
    cannot have."""
    # Every sample has a set of the first, and every token logprobs of the second.
    for name in ("stop_token_ids", "logprob_token_ids"):
        if (count := len(getattr(params, name))) > _MAX_LISTED_TOKENS:
            raise InvalidInputError(f"len({name})", count, f"at most {_MAX_LISTED_TOKENS}")
    for name in ("logit_bias", "stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        ids = getattr(params, name) or ()
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidInputError(name, token, f"must be in [0, {vocab_size})")
    # They are looked for at every token, on the engine's thread.
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        longest = max(map(len, texts), default=0)
        if len(texts) > _MAX_TEXTS or longest > _LONGEST_TEXT:
            raise InvalidInputError(
                name,
                f"{len(texts)} of up to {longest} characters",
                f"at most {_MAX_TEXTS} texts of {_LONGEST_TEXT} characters",
            )
        if texts and not has_tokenizer:
            raise InvalidInputError(name, texts, "texts need a tokenizer")
