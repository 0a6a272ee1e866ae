"""What is done to an engine of several ranks is done on all of them, or refused."""

from __future__ import annotations

import inspect
import json

import pytest

from rollout import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.leading import LeadingEngine
from rollout.parallel import SingleRank

OF_ONE_RANK = {
    "check", "check_integrity", "load_configured_corpora", "metrics", "reset_metrics",
    "save_corpus", "status", "take_configured_corpora", "take_corpus_delta", "take_ended", "watch",
    "weights_manifest", "learned", "require_running", "any_rank_has_unfinished",
}  # fmt: skip
"""They change nothing that drafts or samples depend on, and wait for nobody."""


class Told(SingleRank):
    def tell(self, text: str) -> str:
        raise ZeroDivisionError(json.loads(text)[0])


def calls() -> list[str]:
    found = inspect.getmembers(RolloutEngine, inspect.isfunction)
    return [name for name, _ in found if name[0] != "_" and name not in OF_ONE_RANK]


@pytest.mark.parametrize("name", calls())
def test_a_call_is_told_to_all_ranks_or_refused(name):
    engine = LeadingEngine(object.__new__(RolloutEngine), Told())
    with pytest.raises((ZeroDivisionError, InvalidInputError), match=name):
        getattr(engine, name)()
