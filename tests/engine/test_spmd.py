"""A call to an engine of several ranks is made on all of them, or refused."""

from __future__ import annotations

import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from rollout import RolloutEngine
from rollout.config import ParallelConfig, ParallelMode
from rollout.engine import call_guard, spmd
from rollout.engine.draft_corpus import CorpusDelta
from rollout.engine.protocol import ReplicaEngine, calls_of
from rollout.engine.spmd import Rank0Engine, run_spmd
from rollout.errors import EngineStateError, InvalidInputError, ParallelError
from rollout.parallel import ModelRanks, SingleRank, launch_variables
from rollout.weights.bucket import PackedBucket, buckets
from rollout.weights.source import WeightTensors
from spec_workers.corpus.outbox import CorpusOutbox
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.requests import make_request
from tests.helpers.thread_ranks import on_ranks


class Told(SingleRank):
    def broadcast_bytes(self, data: bytes) -> bytes:
        raise ZeroDivisionError(json.loads(data)[0])


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


BROADCAST = calls_of(ReplicaEngine, all_ranks=True)
OWN = calls_of(ReplicaEngine, all_ranks=False)


def test_a_call_is_told_to_all_ranks_or_refused():
    assert BROADCAST | OWN == public(ReplicaEngine) <= public(RolloutEngine)
    engine = Rank0Engine(without_a_model(), Told())
    for name in sorted(public(RolloutEngine) - OWN):
        error = ZeroDivisionError if name in BROADCAST else InvalidInputError
        if name.startswith("update_weights"):
            continue  # below
        with pytest.raises(error, match=name):
            getattr(engine, name)()
    with pytest.raises(ZeroDivisionError, match="update_weights"):
        engine.update_weights_from_disk("folder")
    with pytest.raises(ZeroDivisionError, match="remove_external_corpus"):
        engine.remove_external_corpus(name="texts")  # an argument of that name
    with pytest.raises(InvalidInputError, match=r"handles=.*list_iterator"):
        engine.update_weights_from_ipc(iter([]))  # what cannot be sent


def test_rank_0_that_cannot_open_its_engine_waits_for_nobody(monkeypatch):
    """The others are in the middle of opening theirs, and would hear of nothing for minutes."""
    told: list[str] = []

    class Line(SingleRank):
        def broadcast_bytes(self, data):
            assert data, "it waits"
            told.append(json.loads(data)[0])
            return data

        def close(self, reason=""):
            object.__setattr__(self, "broadcast_bytes", closed)

    def closed(data):
        raise ParallelError("closed")

    monkeypatch.setattr(spmd, "open_ranks", lambda *_, **__: ModelRanks.of_tensor(Line()))
    two = ParallelConfig(mode=ParallelMode.tensor, size=2)
    with pytest.raises(ZeroDivisionError), spmd.leading(two, lambda _: 1 / 0) as opened:
        opened(None)
    assert told == ["open"]


def test_a_call_that_is_refused_is_told_to_nobody(monkeypatch):
    monkeypatch.setattr(call_guard, "_PATIENCE_SECONDS", 0.0)
    own = without_a_model()
    with own.calls, ThreadPoolExecutor(1) as threads:
        call = threads.submit(Rank0Engine(own, Told()).flush_cache)
        assert isinstance(call.exception(HANG_SECONDS), EngineStateError)


class Recorder:
    """An engine that notes the calls that bring bytes."""

    def __init__(self) -> None:
        self.calls = nullcontext()
        self.made: list[tuple[str, Any, dict[str, Any]]] = []

    def update_weights(self, source: WeightTensors, **options: Any) -> None:
        values = {name: tensor.tolist() for name, tensor in source}
        self.made.append(("update", values, options | {"is_direct": source.is_direct}))

    def learn_corpus_deltas(self, deltas: list[CorpusDelta], **options: Any) -> None:
        self.made.append(("learn", deltas, options))


def test_bytes_that_follow_a_call_are_the_same_on_all_ranks():
    bucket = next(buckets({"a": torch.arange(5), "b": torch.ones(2)}.items()))
    packed = PackedBucket.of(bucket, is_direct=True)
    outbox = CorpusOutbox(1 << 20)
    request = make_request([5, 6], request_id=3)
    outbox.follow([request])
    request.tokens += [7, 8]
    request.weight_versions += [1, 2]
    deltas = [outbox.take(), outbox.take()]

    def run(group):
        recorder = Recorder()
        if group.rank:
            spmd._follow(group, lambda _: recorder)
            return recorder
        engine = spmd._opened(group, lambda _: recorder, None)
        engine.update_weights(packed, weight_version=7)
        engine.learn_corpus_deltas(deltas)
        group.broadcast_bytes(b"")
        return recorder

    for rank in on_ranks(2, run):
        (update, values, options), (learn, learned, _) = rank.made
        assert (update, learn) == ("update", "learn")
        assert options == {"weight_version": 7, "is_direct": True}
        assert values == {"a": [0, 1, 2, 3, 4], "b": [1.0, 1.0]}
        for delta, wanted in zip(learned, deltas, strict=True):
            for each in fields(CorpusDelta):
                assert np.array_equal(getattr(delta, each.name), getattr(wanted, each.name))


def test_a_job_of_fewer_ranks_than_were_launched_is_refused(monkeypatch):
    for name, value in launch_variables(0, 4, 1, 0).items():
        monkeypatch.setenv(name, value)
    config = ParallelConfig(mode=ParallelMode.tensor, size=2)
    with pytest.raises(InvalidInputError, match=r"parallel\.size=2: must be the 4 processes"):
        run_spmd(config, None, None)


def without_a_model() -> RolloutEngine:
    engine = object.__new__(RolloutEngine)
    engine.calls = call_guard.CallGuard(holds_interrupts=True)
    return engine
