"""A cluster of replicas on threads: the rollouts of one engine, whoever dies."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace

import pytest

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.engine.protocol import Engine
from rollout.errors import EngineStateError, InvalidInputError, OutOfMemoryError
from tests.cluster.conftest import cluster_maker
from tests.cluster.thread_pool import kill
from tests.cluster.workload import (
    PARAMS,
    PROMPTS,
    content,
    drain,
    key,
    ngram,
    poll_until,
    rejoined,
    submit_all,
)
from tests.helpers.hang import wait_until

LONG = SamplingParams(temperature=0.9, max_new_tokens=400, ignore_eos=True)
POISON = [9, 9, 9, 9]


@pytest.mark.parametrize("kind", [RolloutEngine, RolloutCluster])
def test_it_has_every_call_of_the_protocol_with_its_arguments(kind):
    for name, method in inspect.getmembers(Engine, inspect.isfunction):
        if name[0] != "_":
            own = inspect.signature(getattr(kind, name))
            assert list(own.parameters) == list(inspect.signature(method).parameters), name


@pytest.mark.parametrize("replicas", [1, 3])
def test_rollouts_and_scores_are_those_of_one_engine(make_cluster, expected, replicas):
    cluster, _ = make_cluster(replicas)
    status = cluster.status()
    assert sorted(status.replicas) == [f"replica-{i}" for i in range(replicas)]
    assert status.kv_slots == sum(each.kv_slots for each in status.replicas.values())
    assert status.waiting == 0
    submit_all(cluster)
    assert cluster.status().waiting == len(expected)
    assert drain(cluster) == expected
    assert cluster.metrics().finished == cluster.status().total.finished == len(expected)
    assert cluster.metrics().generated_tokens == sum(len(each[0]) for each in expected.values())
    token_ids, logprobs, *_ = expected[0, 0]
    assert cluster.score_with_extras(PROMPTS[0], token_ids, PARAMS)[0] == logprobs
    cluster.check_integrity()


def test_replicas_that_die_at_random_are_not_seen_in_the_rollouts(make_cluster, expected):
    cluster, pool = make_cluster(3, max_deaths_per_request=100)
    rng = random.Random(3)
    kills = 0

    def kill_one() -> None:
        nonlocal kills
        if kills < 8 and rng.random() < 0.1:
            pool.living[rng.choice(pool.names)].kill()  # while it starts, too
            kills += 1

    while kills < 3:  # again, where the rollouts ended before
        submit_all(cluster)
        assert drain(cluster, kill_one) == expected


def test_a_request_goes_on_after_what_was_known_of_it(make_cluster, config):
    whole = RolloutEngine.from_config(config, ngram())
    whole.submit([5, 6, 7], LONG)
    expected = drain(whole)
    given = []
    cluster, pool = make_cluster(on_submit=lambda replica, new: given.extend(new))
    with pool.held(after=12):
        request = cluster.submit([5, 6, 7], LONG)
        cluster.watch(request.request_id)
        wait_until(lambda: len(request.token_ids) >= 10, cluster.step)
        for replica in list(pool.living.values()):
            replica.kill()
    known = len(request.token_ids)
    assert drain(cluster) == expected
    assert {len(each.partial_ids) for each in given} == {0, known}


def test_a_request_that_kills_its_replica_fails_alone(make_cluster, expected):
    alone = []

    def on_submit(replica, submissions) -> None:
        if any(each.prompt_ids == POISON for each in submissions):
            alone.append(len(submissions) == 1)
            replica.kill()

    cluster, _ = make_cluster(on_submit=on_submit)
    submit_all(cluster)
    cluster.submit(POISON, PARAMS, prompt_index=99)
    rollouts = {}
    while cluster.has_unfinished:
        rollouts |= {key(each): each for each in cluster.step()}
    poisoned = rollouts.pop((99, 0))
    assert poisoned.finish_reason is FinishReason.ERROR
    assert "3 replicas died" in poisoned.error
    assert alone[-1]
    assert len(alone) == 3
    assert {key: content(each) for key, each in rollouts.items()} == expected


def test_bad_calls_are_refused_at_once(make_cluster, config):
    cluster, _ = make_cluster(1)
    with pytest.raises(InvalidInputError, match="prompt"):
        cluster.submit([97], PARAMS)
    with pytest.raises(InvalidInputError, match="context"):
        cluster.check([3] * 512, PARAMS)
    with pytest.raises(InvalidInputError, match="request_seed"):
        cluster.submit([3], PARAMS, request_seed=2**64)
    small = replace(config, memory=replace(config.memory, max_kv_tokens=64))
    with cluster_maker(small, ngram()) as make_small, pytest.raises(OutOfMemoryError):
        make_small(1)[0].check([3] * 64, PARAMS)
    with pytest.raises(InvalidInputError, match="abort, retract, in_place"):
        cluster.pause_generation("soon")
    with pytest.raises(EngineStateError):
        cluster.resume_memory(["weights"])
    assert not cluster.has_unfinished
    assert cluster.can_run


def test_an_aborted_request_ends_at_once_with_what_is_known(make_cluster):
    cluster, _ = make_cluster(2)
    queued = [cluster.submit([5, 6, i], LONG) for i in range(12)]
    cluster.watch(queued[0].request_id)
    wait_until(lambda: len(queued[0].token_ids) > 5, cluster.step)
    for request in queued:
        cluster.abort(request.request_id)
        cluster.abort(request.request_id)
    ended = {each.request_id: each for each in cluster.take_ended()}
    assert len(ended) == 12
    assert {each.finish_reason for each in ended.values()} == {FinishReason.ABORT}
    assert len(ended[queued[0].request_id].token_ids) > 5
    assert not cluster.has_unfinished
    wait_until(lambda: cluster.status().running == cluster.status().waiting == 0, cluster.step)


def test_pausing_with_abort_hands_out_every_token_there_is(make_cluster):
    cluster, _ = make_cluster(2)
    requests = [cluster.submit([5, 6, i], LONG, prompt_index=i) for i in range(12)]
    cluster.watch(requests[0].request_id)
    wait_until(lambda: len(requests[0].token_ids) > 5, cluster.step)
    cluster.pause_generation("abort")
    rollouts = cluster.take_ended()
    assert len(rollouts) == 12
    assert not cluster.has_unfinished
    assert "paused" in cluster.unavailable_reason
    num_tokens = sum(len(each.token_ids) for each in rollouts)
    assert cluster.metrics().generated_tokens == num_tokens > 5
    cluster.continue_generation()
    assert cluster.can_run


def test_a_paused_cluster_goes_on_where_it_was_whoever_died(make_cluster, expected):
    cluster, pool = make_cluster(2)
    submit_all(cluster)
    ended = {}
    for _ in range(3):
        ended |= {key(each): content(each) for each in cluster.step()}
    cluster.pause_generation("retract")
    ended |= {key(each): content(each) for each in cluster.take_ended()}
    kill(cluster, pool, "replica-0")
    poll_until(cluster, lambda: cluster.replicas.all_joined)
    assert not cluster.can_run
    cluster.continue_generation()
    assert ended | drain(cluster) == expected


def test_a_newcomer_that_cannot_be_brought_up_to_date_does_not_join(make_cluster, expected):
    cluster, pool = make_cluster(2)
    wrong = (RolloutEngine.weights_digest, "?")
    calls = iter([wrong, (RolloutEngine.flush_cache,)])
    cluster.replicas.on_join(lambda replica: replica.call(*next(calls)))
    pool.living["replica-0"].kill()
    submit_all(cluster)
    found = drain(cluster)
    rejoined(cluster)
    assert found == expected
    assert len(pool.lives) == 4
