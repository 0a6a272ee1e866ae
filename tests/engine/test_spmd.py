"""A call to an engine of several ranks is made on all of them, or refused."""

from __future__ import annotations

import inspect
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout import RolloutEngine
from rollout.engine import call_guard
from rollout.engine.protocol import Engine, Ranks, methods_on
from rollout.engine.spmd import Rank0Engine
from rollout.errors import EngineStateError, InvalidInputError
from rollout.parallel import SingleRank
from tests.helpers.hang import HANG_SECONDS


class Told(SingleRank):
    def tell(self, data: bytes) -> bytes:
        raise ZeroDivisionError(json.loads(data)[0])


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


def test_every_method_of_the_protocol_says_which_ranks_make_the_call():
    marked = [name for ranks in Ranks for name in methods_on(ranks)]
    assert len(marked) == len(set(marked))
    assert set(marked) == public(Engine) <= public(RolloutEngine)


@pytest.mark.parametrize("name", sorted(public(RolloutEngine) - set(methods_on(Ranks.FIRST))))
def test_a_call_is_told_to_all_ranks_or_refused(name):
    engine = Rank0Engine(without_a_model(), Told())
    error = ZeroDivisionError if name in methods_on(Ranks.EVERY) else InvalidInputError
    tensors = [{}] if name == "update_weights_from_tensor" else []
    with pytest.raises(error, match=name):
        getattr(engine, name)(*tensors)


def test_an_argument_that_cannot_be_sent_is_refused_before_anybody_hears_of_it():
    engine = Rank0Engine(without_a_model(), Told())
    with pytest.raises(InvalidInputError, match=r"update_weights_from_ipc.*list_iterator"):
        engine.update_weights_from_ipc(iter([]))


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
