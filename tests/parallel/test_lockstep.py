"""Ranks in lockstep: each forward is entered as often on every rank, whatever each has to do."""

from __future__ import annotations

import json

import pytest

from rollout import RolloutEngine
from rollout.engine.engine_loop import EngineLoop
from rollout.errors import InvalidInputError
from tests.helpers.launch import launch
from tests.helpers.tiny_draft import save_tiny_eagle1, save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp

PROMPT = [5, 9, 3, 7, 1, 0, 8, 4, 6, 9, 10]  # two chunks of eight: a step that samples nothing
OPTIONS = {"num_steps": 3, "topk": 4, "num_draft_tokens": 8, "min_probability": 0.0}
TARGET = ["target.forward", "target.logits"]
GROWN = ["draft.logits"] + ["draft.forward", "draft.logits"] * 2
EXTENDED = {"eagle": ["draft.fuse", "draft.forward"], "mtp": ["draft.fuse"] + ["draft.forward"] * 3}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    """A model of few tokens, so that a random draft is accepted now and then."""
    return save_tiny_llama(tmp_path_factory.mktemp("target"), vocab_size=11)


def test_ranks_with_and_without_requests(target_path, tmp_path, monkeypatch):
    one, short = (PROMPT, 24), (PROMPT[:3], 1)
    requests = [
        [[one, (PROMPT[:5], 12)], []],  # a rank that is idle from the start
        [[short, short], [one, short, (PROMPT[2:], 7)]],  # they end at different times
        [[one], [one]],
    ]
    eagle1 = save_tiny_eagle1(tmp_path / "eagle1", target_path)
    eagle3 = save_tiny_eagle3(tmp_path / "eagle3", target_path)
    with_chain, _ = save_tiny_mtp(tmp_path, "mimo", 3, vocab_size=11)
    workers = [
        ("eagle", target_path, {"draft_path": str(eagle1), **OPTIONS}),
        ("eagle", target_path, {"draft_path": str(eagle3), **OPTIONS}),
        ("hybrid", target_path, {"draft_path": str(eagle3), **OPTIONS}),
        ("mtp", with_chain, {**OPTIONS, "num_steps": None}),
    ]
    cases = [
        {"spec": spec, "target": str(target), "options": options, "requests": each}
        for spec, target, options in workers
        for each in requests
    ]
    monkeypatch.setenv("LOCKSTEP_CASES", json.dumps(cases))
    ranks = launch("tests.helpers.lockstep_ranks", tmp_path, ranks=2)
    for case, first, second in zip(cases, *ranks, strict=True):
        entered = GROWN + TARGET + EXTENDED["mtp" if case["spec"] == "mtp" else "eagle"]
        assert first["same_tokens"]
        assert second["same_tokens"]
        assert first["steps"] == second["steps"] > 2
        assert first["forwards"] == second["forwards"] == entered
        assert first["all_alike"]
        assert second["all_alike"]
    for begin in range(0, len(cases), len(requests)):
        first, second = (rank[begin : begin + len(requests)] for rank in ranks)
        assert [run["idle"] for run in second] == [first[0]["steps"], 0, 0]
        assert first[1]["idle"] > 0
        assert sum(run["accepted"] for run in first) > 0


def test_a_step_of_nothing_runs_in_lockstep_alone(target_path, tmp_path):
    draft = save_tiny_eagle3(tmp_path / "draft", target_path)
    for lockstep in (False, True):
        engine = RolloutEngine.from_pretrained(
            str(target_path),
            "eagle",
            spec_options={"draft_path": str(draft), "budget": "fixed", "lockstep": lockstep},
            kv_bytes=1 << 20,
        )
        assert engine.step() == []
        assert engine.metrics().steps == lockstep
        assert not engine.has_unfinished
        engine.pause_generation()
        assert engine.step() == []
        assert engine.metrics().steps == lockstep
        engine.check_integrity()


def test_an_engine_loop_cannot_keep_the_step(target_path, tmp_path):
    draft = save_tiny_eagle3(tmp_path / "draft", target_path)
    engine = RolloutEngine.from_pretrained(
        str(target_path),
        "eagle",
        spec_options={"draft_path": str(draft), "lockstep": True},
        kv_bytes=1 << 20,
    )
    with pytest.raises(InvalidInputError, match="lockstep"):
        EngineLoop(engine)
