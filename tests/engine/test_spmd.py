"""What is done to an engine of several ranks is done on all of them, or refused."""

from __future__ import annotations

import inspect
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout import RolloutEngine
from rollout.engine import call_guard
from rollout.engine.spmd import Rank0Engine
from rollout.errors import EngineStateError, InvalidInputError
from rollout.parallel import SingleRank
from tests.helpers.hang import HANG_SECONDS

OF_ONE_RANK = {
    "check", "check_integrity", "load_configured_corpora", "metrics", "reset_metrics",
    "save_corpus", "status", "take_configured_corpora", "take_corpus_delta", "take_ended", "watch",
    "weights_manifest", "learned", "require_running", "any_rank_has_unfinished", "claim",
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
    engine = Rank0Engine(without_a_model(), Told())
    with pytest.raises((ZeroDivisionError, InvalidInputError), match=name):
        getattr(engine, name)()


def test_a_call_that_is_refused_is_told_to_nobody(monkeypatch):
    monkeypatch.setattr(call_guard, "_PATIENCE_SECONDS", 0.0)
    own = without_a_model()
    with own.calls, ThreadPoolExecutor(1) as threads:
        call = threads.submit(Rank0Engine(own, Told()).flush_cache)
        assert isinstance(call.exception(HANG_SECONDS), EngineStateError)


def without_a_model() -> RolloutEngine:
    engine = object.__new__(RolloutEngine)
    engine.calls = call_guard.CallGuard(holds_interrupts=True)
    return engine
