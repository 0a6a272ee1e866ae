"""Corpora of a cluster: what one replica commits all draft from."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.errors import InvalidInputError
from tests.cluster.thread_pool import kill
from tests.cluster.workload import always_drafts, content, drain, key, rejoined, submit_all

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=60, ignore_eos=True, n=2)
PROMPTS = [[5 + i, 6, 7] for i in range(8)]


def counters(cluster: RolloutCluster, name: str) -> list[float]:
    statuses = cluster.replicas.on_all("status").values()
    return [each.counters.get(f"corpus/{name}", 0.0) for each in statuses]


def test_each_replica_learns_what_the_others_committed(make, text_config):
    cluster, _ = make(3)
    submit_all(cluster, PROMPTS, PARAMS)
    rollouts = drain(cluster)
    cluster.corpus_exchange.finish()
    submit_all(cluster, [[60, 61]], SamplingParams(max_new_tokens=1))
    drain(cluster)  # a step each replica that has one
    total = sum(len(each[0]) for each in rollouts.values())
    shared, waiting = counters(cluster, "shared_tokens"), counters(cluster, "learned_tokens")
    assert sum(shared) >= total
    for own, learned in zip(shared, waiting, strict=True):
        assert learned <= sum(shared) - own  # none of its own; an idle one learns when it steps
    assert sum(counters(cluster, "lost_rollouts")) == 0
    assert sum(counters(cluster, "unshared_rollouts")) == 0
    engine = RolloutEngine.from_config(text_config, always_drafts())
    assert rollouts == {key(each): content(each) for each in engine.generate(PROMPTS, PARAMS)}


def accept_length(cluster: RolloutCluster) -> float:
    """The accept length over the rollouts of one epoch."""
    submit_all(cluster, PROMPTS, PARAMS)
    stats = []
    while cluster.has_unfinished:
        stats += [each.stats for each in cluster.step()]
    steps = sum(each.verify_steps for each in stats)
    return (steps + sum(each.accepted for each in stats)) / steps


def test_sharing_lengthens_what_another_replica_has_accepted(make):
    """The second epoch, after a death: its prompts move to one that never ran them."""
    lengths = {}
    for shares in (False, True):
        cluster, pool = make(2, share_corpus=shares)
        accept_length(cluster)
        if shares:
            cluster.corpus_exchange.finish()
        kill(cluster, pool, "replica-0")
        lengths[shares] = accept_length(cluster)
    assert lengths[True] > 1.15 * lengths[False]


def test_a_replica_that_starts_shares_from_then_on(make):
    cluster, pool = make(2)
    kill(cluster, pool, "replica-1")
    rejoined(cluster)
    submit_all(cluster, PROMPTS, PARAMS)
    drain(cluster)
    cluster.corpus_exchange.finish()
    assert min(counters(cluster, "shared_tokens")) > 0


def test_workers_without_a_corpus_have_nothing_to_share(make):
    cluster, _ = make(2, always_drafts("none"))
    begun_at = cluster.corpus_exchange._begun_at
    submit_all(cluster, PROMPTS, PARAMS)
    assert len(drain(cluster)) == 16
    assert cluster.corpus_exchange._begun_at == begun_at, "a round has begun"
    with pytest.raises(InvalidInputError, match="has no corpus"):
        cluster.add_external_corpus("texts", documents=["one two"])
