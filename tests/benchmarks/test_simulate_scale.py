"""The simulation of many replicas, against what can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from scale_cluster import Policy, Simulation, Workload
from scale_replica import Cost, SimulatedReplica, fitted, recorded
from simulate_scale import LATENCY_SECONDS, PIECE_BYTES, Shape, best_bucket, broadcast_seconds

from rollout.engine.draft_corpus import CorpusDelta
from spec_workers.corpus_outbox import CorpusOutbox
from tests.helpers.requests import make_request

COST = Cost(base=2e-3, per_context_token=1e-7)


def test_a_replica_takes_the_time_of_its_steps_one_by_one():
    replica = SimulatedReplica(COST, 3, speculates=False)
    remaining = {0: 5, 1: 9, 2: 9, 3: 4}  # the last waits for a seat
    context = dict.fromkeys(remaining, 100)
    for request, count in remaining.items():
        replica.start(request, context[request], count)
    running, waiting, clock, ends = [0, 1, 2], [3], 0.0, {}
    while running:
        clock += COST.base
        clock += COST.per_context_token * sum(context[r] + 0.5 for r in running)
        for request in list(running):
            context[request] += 1
            remaining[request] -= 1
            if not remaining[request]:
                ends[request] = clock
                running.remove(request)
                running += [waiting.pop()] if waiting else []
    found = {}
    while replica.num_running:
        now = replica.next_end()
        found |= dict.fromkeys(replica.advance(now), now)
    assert found == pytest.approx(ends)


def test_looking_at_a_replica_between_events_changes_nothing():
    rng = np.random.default_rng(0)
    ends = []
    for looks in (0, 200):
        replica = SimulatedReplica(COST, 8, speculates=True)
        for request in range(20):
            replica.start(request, 50, 10 + 7 * request)
        found: dict[int, float] = {}
        for now in np.sort(rng.uniform(0, 0.05, looks)):
            found |= dict.fromkeys(replica.advance(float(now)), 0.0)
        while replica.num_running:
            now = replica.next_end()
            found |= dict.fromkeys(replica.advance(now), now)
        ends.append(max(found.values()))
        assert sorted(found) == list(range(20))
    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize("policy", Policy)
def test_every_rollout_ends_and_nobody_idles_more_than_all_the_time(policy):
    work = Workload(groups_per_step=32, samples=4, num_steps=3, seats=8)
    simulation = Simulation(4, work, COST, fitted, policy=policy)
    outcome = simulation.run()
    assert 0 <= outcome.idle < 1
    assert -1e-9 <= outcome.empty_seats < 1
    assert outcome.tokens_per_second > 0
    assert 0 <= outcome.stale <= 1
    assert (outcome.stale == 0) == (policy is Policy.SYNCHRONOUS)


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
    assert sum(getattr(each, "nbytes", 0) for each in arrays) == delta.num_bytes
    assert delta.num_bytes == 4 * PIECE_BYTES + 4 * 4 * 7 + fixed


def test_lengths_of_files(tmp_path):
    jsonl = tmp_path / "rollouts.jsonl"
    rows = [{"prompt_index": i // 2, "token_ids": [0] * (3 + 4 * (i // 2))} for i in range(4)]
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = tmp_path / "trace.npz"
    np.savez(trace, resp_off=[0, 3, 6, 13, 20], resp_prompt=[0, 0, 1, 1])
    for path in (jsonl, trace):
        sample = recorded(path)
        drawn = {tuple(sample(np.random.default_rng(seed), 3).tolist()) for seed in range(20)}
        assert drawn == {(3, 3, 3), (7, 7, 7)}
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(FileNotFoundError, match="holds no rollouts"):
        recorded(empty)
