"""Sampling parameters by the names that vLLM, sglang, OpenAI and transformers have for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollout.errors import InvalidInputError

FIELD_OF: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "stop_strings": "stop",  # transformers'
    "stop_regex": "stop_regex",  # sglang's
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "allowed_token_ids": "allowed_token_ids",  # vLLM's, and the next two
    "bad_words": "bad_words",
    "logprob_token_ids": "logprob_token_ids",
    "min_new_tokens": "min_new_tokens",
    "min_tokens": "min_new_tokens",  # vLLM's
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",  # vLLM's
    "json_schema": "json_schema",  # sglang's, and the next two
    "regex": "regex",
    "ebnf": "ebnf",
    "seed": "seed",
    "sampling_seed": "seed",  # sglang's
}
"""Other engines' names of parameters, with the field of SamplingParams that means the same."""

WITHOUT_EFFECT = frozenset({
    # How text is made of tokens
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    # How it is handed over, and what is cached
    "output_kind", "stream_interval", "output_text_buffer_length", "skip_clone",
    "skip_reading_prefix_cache", "use_cache",
})  # fmt: skip
"""Parameters that no token and no logprob depends on."""

ONLY_VALUE: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "num_return_sequences": 1,
    "num_beams": 1,
    "do_sample": True,
}
"""Parameters that a trainer may name, with the one value that asks for nothing else."""


def our_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams. None stands for the default; of two names the later counts."""
    ours = {FIELD_OF[name]: value for name, value in given.items() if name in FIELD_OF}
    for name in ("stop", "stop_regex"):
        if isinstance(ours.get(name), str):
            ours[name] = [ours[name]]
    return {name: value for name, value in ours.items() if value is not None}


def refuse_unhonoured(
    given: Mapping[str, Any], field: Callable[[str], str], *, but: Collection[str] = ()
) -> None:
    """Raise InvalidInputError for the first that is set and no engine of ours can honour.

    Args:
        field: from a parameter's name to that of the field in the message.
        but: names that the caller cannot honour either.
    """
    for name, value in given.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in ONLY_VALUE:
            if value != ONLY_VALUE[name]:
                raise InvalidInputError(field(name), value, f"must be {ONLY_VALUE[name]}")
        elif name not in FIELD_OF or name in but:
            known = ", ".join(sorted(FIELD_OF.keys() - set(but)))
            raise InvalidInputError(
                field(name), value, f"cannot be honoured; leave it out. There are {known}"
            )
