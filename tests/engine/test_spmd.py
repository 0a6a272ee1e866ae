"""Ranks of one program: one that cannot open its engine, and wrong numbers of them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rollout.config import ParallelConfig, ParallelMode
from rollout.engine import spmd
from rollout.engine.spmd import run_spmd
from rollout.errors import InvalidInputError, ParallelError
from rollout.parallel import ModelRanks, SingleRank, launch_variables
from rollout.parallel.rank_leader import Ended, RankLeader
from tests.helpers.thread_ranks import on_ranks


class Line(SingleRank):
    """Rank 0's connection to another one, whose messages are noted."""

    def __init__(self, told: list[Any]) -> None:
        object.__setattr__(self, "size", 2)
        object.__setattr__(self, "told", told)

    def broadcast_bytes(self, data: bytes) -> bytes:
        self.told.append(pickle.loads(data))
        return data

    def close(self, reason: str = "") -> None:
        def closed(data: bytes) -> bytes:
            raise ParallelError("closed")

        object.__setattr__(self, "broadcast_bytes", closed)


def test_rank_0_that_cannot_open_its_engine_waits_for_nobody(monkeypatch):
    """The others are in the middle of opening theirs, and would hear of nothing for minutes."""
    told: list[Any] = []
    ranks = ModelRanks.of_tensor(Line(told), Line(told))
    monkeypatch.setattr(spmd, "open_ranks", lambda *_, **__: ranks)
    two = ParallelConfig(mode=ParallelMode.tensor, size=2)
    with pytest.raises(ZeroDivisionError), spmd.leading(two, lambda _: 1 / 0) as opened:
        opened(None)
    assert told == ["open"]


def test_a_job_of_fewer_ranks_than_were_launched_is_refused(monkeypatch):
    for name, value in launch_variables(0, 4, 1, 0).items():
        monkeypatch.setenv(name, value)
    config = ParallelConfig(mode=ParallelMode.tensor, size=2)
    with pytest.raises(InvalidInputError, match=r"parallel\.size=2: must be the 4 processes"):
        run_spmd(config, None, None)


def test_the_others_follow_to_the_end_of_the_outermost_lead():
    def run(group) -> list[Any]:
        leader = RankLeader(group)
        if group.rank:
            return [*leader.messages(), *leader.messages()]
        with leader.leading():
            leader.tell("first")
            assert leader.run(lambda: leader.tell("second")) is None
            assert leader.is_followed
        assert not leader.is_followed
        with pytest.raises(ZeroDivisionError):
            leader.run(lambda: 1 / 0)
        return []

    _, told = on_ranks(2, run)
    assert told == ["first", "second", Ended(), Ended(error="ZeroDivisionError: division by zero")]


def test_the_others_hear_of_a_lead_that_failed_and_of_a_result_that_cannot_be_sent():
    told: list[Any] = []
    leader = RankLeader(Line(told))
    with pytest.raises(ZeroDivisionError), leader.leading():
        raise ZeroDivisionError("no")
    with pytest.raises(TypeError, match="pickle"):
        leader.run(lambda: (token for token in ()))
    assert [ended.error.split(":")[0] for ended in told] == [
        "ZeroDivisionError",
        "its result cannot be sent",
    ]
    assert not leader.is_followed
