"""The proposer's options, which vLLM carries in ``additional_config={"specrollout": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ngram_native import MAX_BUDGET
from rollout.errors import InvalidInputError
from rollout.validation import checked_int, did_you_mean

FIELD = "additional_config.specrollout"


@dataclass(frozen=True, kw_only=True)
class ProposerOptions:
    """Options of `NgramProposer`, named as those of the worker `ngram`.

    Args:
        budget: ``learned``: chains of the length that pays, none where none does. ``fixed``: all
            ``num_speculative_tokens``, as far as the corpus has any.
        min_probability: tokens less likely to be accepted are never drafted; ``learned`` drafts
            none below 0.02.
        corpus_bytes: bound on the corpus of rollouts and its index.
        corpus_path: what an earlier run saved, to begin with; default: an empty corpus.
        external_corpora: name -> JSONL file, per line a JSON string or an object with ``text``.
            Loaded in the background as the engine starts.
        max_external_bytes: bound on all external corpora together, loading ones included.
        max_external_tokens: bound on the tokens of all external corpora together.

    The corpus checks the last five. Raises InvalidInputError, naming the option.
    """

    budget: str = "learned"
    min_probability: float = 0.0
    corpus_bytes: int = 256 << 20
    corpus_path: str | None = None
    external_corpora: Mapping[str, str] | None = None
    max_external_bytes: int = 1 << 30
    max_external_tokens: int = 1 << 24

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str) or self.budget not in ("learned", "fixed"):
            hint = did_you_mean(self.budget, ("learned", "fixed"))
            raise InvalidInputError(
                f"{FIELD}.budget", self.budget, f"must be learned or fixed{hint}"
            )
        value = self.min_probability
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= 1:
            remedy = "must be a number in [0, 1]"
            raise InvalidInputError(f"{FIELD}.min_probability", value, remedy)

    @classmethod
    def of(cls, vllm_config: Any) -> ProposerOptions:
        """The options in vLLM's configuration; the defaults where it has none."""
        carried = vllm_config.additional_config
        given = carried.get("specrollout", {}) if isinstance(carried, Mapping) else {}
        if not isinstance(given, Mapping):
            raise InvalidInputError(FIELD, given, "must be an object of options")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known)
                remedy = f"must be one of {', '.join(known)}{hint}"
                raise InvalidInputError(f"{FIELD}.{name}", given[name], remedy)
        return cls(**given)


def checked_num_tokens(vllm_config: Any) -> int:
    """``num_speculative_tokens`` of vLLM's configuration. Raises InvalidInputError."""
    return checked_int(
        vllm_config.speculative_config.num_speculative_tokens,
        "speculative_config.num_speculative_tokens",
        minimum=1,
        maximum=MAX_BUDGET,
    )
