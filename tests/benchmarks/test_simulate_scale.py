"""The simulation of many replicas, against what can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from scale_cluster import (
    CONTEXT_TOKEN_SECONDS,
    STEP_SECONDS,
    TICK_SECONDS,
    Policy,
    Simulation,
    fitted,
    recorded,
)
from simulate_scale import LATENCY_SECONDS, PIECE_BYTES, Shape, best_bucket, broadcast_seconds

from rollout.engine.draft_corpus import CorpusDelta
from spec_workers.corpus.outbox import CorpusOutbox
from tests.helpers.requests import make_request


def test_a_replica_takes_the_time_of_its_steps_one_by_one():
    """A group of three, of which one waits to run."""
    lengths = lambda rng, count: np.array([500, 900, 900])  # noqa: E731
    simulation = Simulation(
        1, lengths, groups_per_step=1, samples=3, speculates=False, max_running=2
    )
    outcome = simulation.run()
    clock, remaining, contexts, waiting = 0.0, [500, 900], [512, 512], [900]
    while remaining:
        clock += STEP_SECONDS + CONTEXT_TOKEN_SECONDS * sum(contexts)
        remaining = [each - 1 for each in remaining]
        contexts = [each + 1 for each in contexts]
        if 0 in remaining:
            ended = remaining.index(0)
            del remaining[ended], contexts[ended]
            if waiting:
                remaining.append(waiting.pop())
                contexts.append(512)
    ticks = 3 * TICK_SECONDS
    assert clock <= outcome.step_seconds < clock + ticks
    assert outcome.tokens_per_second == pytest.approx(2300 / clock, rel=ticks / clock)
    assert outcome.unused == pytest.approx(1 - 2300 / 2 / 1400, abs=0.02)
    assert (outcome.idle, outcome.spread) == (0, 0)


@pytest.mark.parametrize("policy", Policy)
def test_every_rollout_ends_and_nobody_idles_more_than_all_the_time(policy):
    outcome = Simulation(
        4, fitted, groups_per_step=32, samples=4, policy=policy, max_running=8
    ).run()
    assert 0 <= outcome.idle < 0.5
    assert 0 <= outcome.unused < 0.6
    assert (outcome.stale == 0) == (policy is Policy.SYNCHRONOUS)
    if policy is Policy.STREAMING:
        assert 0 < outcome.stale < 0.27, "what waits to run has not begun"


def test_broadcasts_by_hand():
    size, speed = 8 * 2.0**30, 2.0**30
    one = 1.0 + LATENCY_SECONDS
    assert broadcast_seconds(Shape.FLAT, 5, size, speed, 2**30) == pytest.approx(5 * 8 * one)
    # The first bucket passes 5 links; the other 7 follow one by one.
    assert broadcast_seconds(Shape.CHAIN, 5, size, speed, 2**30) == pytest.approx((5 + 7) * one)
    # Two levels; each bucket leaves twice, one copy after the other.
    assert broadcast_seconds(Shape.TREE, 6, size, speed, 2**30) == pytest.approx(2 * (2 + 7) * one)
    for shape in Shape:
        assert broadcast_seconds(shape, 1, size, speed, 2**30) == pytest.approx(8 * one)
        bucket, seconds = best_bucket(shape, 64, size, speed)
        assert seconds <= broadcast_seconds(shape, 64, size, speed, bucket // 2)


def test_a_piece_costs_the_bytes_that_a_delta_has():
    outbox = CorpusOutbox(1 << 20)
    requests = []
    for number in range(4):
        request = make_request([1, 2, 3], request_id=number)
        request.tokens += [5] * 10
        request.weight_versions += [0] * 10
        requests.append(request)
    outbox.follow(requests)
    outbox.take()
    for request in requests:
        request.tokens += [6] * 7
        request.weight_versions += [0] * 7
    delta = outbox.take()
    arrays = [getattr(delta, each.name) for each in fields(CorpusDelta)]
    fixed = 2 * 8  # of the offsets, one more than there are entries
    num_bytes = sum(getattr(each, "nbytes", 0) for each in arrays)
    assert num_bytes == 4 * PIECE_BYTES + 4 * 4 * 7 + fixed


def test_lengths_of_files(tmp_path):
    jsonl = tmp_path / "rollouts.jsonl"
    rows = [{"prompt_index": i // 2, "token_ids": [0] * (3 + 4 * (i // 2))} for i in range(4)]
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = tmp_path / "trace.npz"
    np.savez(
        trace, prompt_tokens=[1, 1], prompt_off=[0, 1, 2], resp_tokens=[2] * 20,
        resp_off=[0, 3, 6, 13, 20], resp_prompt=[0, 0, 1, 1], resp_step=[0] * 4,
    )  # fmt: skip
    for path in (jsonl, trace):
        sample = recorded(path)
        drawn = {tuple(sample(np.random.default_rng(seed), 3).tolist()) for seed in range(20)}
        assert drawn == {(3, 3, 3), (7, 7, 7)}
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(FileNotFoundError, match="holds no rollouts"):
        recorded(empty)
