"""The proposer's options, which vLLM carries in ``additional_config={"specrollout": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ngram_native import MAX_BUDGET
from rollout.errors import InvalidInputError
from rollout.validation import checked_int, checked_member, checked_number, did_you_mean
from spec_workers.budget import BudgetKind
from spec_workers.corpus.options import CorpusOptions

FIELD = "additional_config.specrollout"


@dataclass(frozen=True, kw_only=True)
class ProposerOptions(CorpusOptions):
    """Options of `NgramProposer`, named as those of the worker `ngram`; the corpus's are inherited.

    Args:
        budget: ``learned``: chains of the length that pays, none where none does. ``fixed``: all
            ``num_speculative_tokens``, as far as the corpus has any.
        min_probability: tokens less likely to be accepted are never drafted; ``learned`` drafts
            none below 0.02.

    External corpora load as the engine starts. Raises InvalidInputError, naming the option.
    """

    section: ClassVar[str] = FIELD

    budget: str = BudgetKind.LEARNED
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_member(self.budget, f"{FIELD}.budget", BudgetKind)
        checked_number(self.min_probability, f"{FIELD}.min_probability", maximum=1)

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
