"""Replicas draft from what all committed, and each takes every change of external corpora."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError
from tests.cluster.thread_pool import ThreadReplica, intercept, kill
from tests.cluster.workload import (
    always_drafts,
    drain,
    generated,
    poll_until,
    rejoined,
    submit_all,
)
from tests.helpers.gated_list import GatedList
from tests.helpers.hang import wait_until

CHUNKS = {"token_chunks": [[5, 6, 7]]}


def gated(replica: ThreadReplica) -> threading.Event:
    """Until it is set, the replica waits in the middle of what it loads."""
    opened = threading.Event()

    def gate(_, kwargs) -> None:
        kwargs["token_chunks"] = GatedList(kwargs["token_chunks"], opened)

    intercept(replica, "add_external_corpus", gate)
    return opened


def states(cluster: RolloutCluster) -> dict[str, str]:
    return {each.name: each.state.value for each in cluster.external_corpora()}


def on_each(cluster: RolloutCluster) -> list[set[str]]:
    answers = cluster.replicas.on_all(RolloutEngine.external_corpora)
    return [{each.name for each in answers[name]} for name in sorted(answers)]


def test_a_corpus_is_as_far_as_on_the_slowest_replica(make):
    cluster, pool = make(2)
    opened = gated(pool.living["replica-1"])
    cluster.add_external_corpus("texts", **CHUNKS)
    generated(cluster)
    assert states(cluster) == {"texts": "loading"}
    opened.set()
    wait_until(lambda: states(cluster) == {"texts": "published"}, cluster.step)
    pool.living["replica-0"].call(RolloutEngine.remove_external_corpus, "texts").result()
    (seen,) = cluster.external_corpora()
    assert seen.error == "replica-0 lacks it"
    cluster.remove_external_corpus("texts")
    assert on_each(cluster) == [set(), set()]


def test_replicas_that_start_take_every_change_however_they_come_and_go(make, text_config):
    """Corpora and replicas, at random, during generation."""
    cluster, pool = make(3, max_deaths_per_request=100)
    rng = random.Random(5)
    names: list[str] = []

    def disturb() -> None:
        if rng.random() < 0.05:
            rng.choice(list(pool.living.values())).kill()
        if names and rng.random() < 0.3:
            cluster.remove_external_corpus(names.pop(rng.randrange(len(names))))
        elif rng.random() < 0.5:
            names.append(cluster.add_external_corpus(token_chunks=[rng.choices(range(97), k=2000)]))
        assert on_each(cluster) == [set(names)] * len(cluster.replicas.joined)

    submit_all(cluster)
    engine = RolloutEngine.from_config(text_config, always_drafts())
    assert drain(cluster, disturb) == generated(engine)
    rejoined(cluster)
    wait_until(lambda: states(cluster) == dict.fromkeys(names, "published"), cluster.step)


def test_on_request_it_waits_for_the_request(make):
    cluster, pool = make(2)
    cluster.add_external_corpus("texts", **CHUNKS, publish="on_request", wait=True)
    assert states(cluster) == {"texts": "ready"}
    kill(cluster, pool, "replica-0")
    rejoined(cluster)
    wait_until(lambda: states(cluster) == {"texts": "ready"}, cluster.step)
    for _ in range(2):
        cluster.publish_external_corpus("texts")
    assert states(cluster) == {"texts": "published"}
    kill(cluster, pool, "replica-1")
    rejoined(cluster)
    wait_until(lambda: states(cluster) == {"texts": "published"}, cluster.step)
    for method in ("publish_external_corpus", "remove_external_corpus"):
        with pytest.raises(InvalidInputError, match="name='other': is unknown; there are texts"):
            getattr(cluster, method)("other")


def test_a_request_to_publish_reaches_a_replica_that_is_starting(make):
    cluster, pool = make(2)
    cluster.add_external_corpus("texts", **CHUNKS, publish="on_request", wait=True)
    begun, may_join = [], Future()
    cluster.replicas.on_join(lambda _: may_join)
    kill(cluster, pool, "replica-0")
    intercept(pool.living["replica-0"], "add_external_corpus", lambda *_: begun.append(True))
    poll_until(cluster, lambda: begun)
    cluster.publish_external_corpus("texts")
    may_join.set_result(None)
    rejoined(cluster)
    wait_until(lambda: states(cluster) == {"texts": "published"}, cluster.step)


def test_while_no_replica_lives_a_corpus_is_not_lost(make):
    cluster, pool = make(1)
    cluster.add_external_corpus("texts", **CHUNKS)
    kill(cluster, pool, "replica-0")
    assert states(cluster).keys() == {"texts"}


def test_a_corpus_that_one_replica_refuses_or_cannot_load_is_on_none(make, tmp_path):
    cluster, pool = make(2)
    file, damaged = tmp_path / "texts.jsonl", tmp_path / "damaged.jsonl"
    file.write_text(json.dumps("one two three") + "\n")
    damaged.write_text("{not JSON\n")
    one = pool.living["replica-1"]
    one.call(RolloutEngine.add_external_corpus, "taken", documents=["one"]).result()
    with pytest.raises(InvalidInputError, match="is taken"):
        cluster.add_external_corpus("taken", documents=["two"])
    assert on_each(cluster) == [set(), {"taken"}]
    one.call(RolloutEngine.remove_external_corpus, "taken").result()

    # On this replica's host it is another file.
    intercept(one, "add_external_corpus", lambda _, kwargs: kwargs.update(file_path=str(damaged)))
    with pytest.raises(InvalidInputError, match=r"could not be loaded: on replica-1: .*damaged"):
        cluster.add_external_corpus("texts", file_path=file, wait=True)
    assert on_each(cluster) == [set(), set()]


def test_each_replica_loads_the_configured_ones_unless_they_were_removed(make, tmp_path):
    code = tmp_path / "code.jsonl"
    code.write_text('"one two three"\n')
    options = {"budget": "fixed", "calibration_seconds": 0, "corpus_bytes": 1 << 20}
    factory = worker_factory("ngram", **options, external_corpora={"code": str(code)})
    cluster, pool = make(2, factory)
    generated(cluster)
    wait_until(lambda: states(cluster) == {"code": "published"}, cluster.step)
    cluster.remove_external_corpus("code")
    kill(cluster, pool, "replica-0")
    rejoined(cluster)
    assert on_each(cluster) == [set(), set()]


def test_a_file_is_saved_by_one_and_loaded_by_all_and_by_who_starts_later(make, tmp_path):
    cluster, pool = make(2)
    cluster.add_external_corpus("old", documents=["one two three"], wait=True)
    generated(cluster)
    assert states(cluster) == {"old": "published"}
    cluster.save_corpus(tmp_path / "corpus")
    other, pool = make(2)
    other.add_external_corpus("lost", documents=["seven"], wait=True)  # the file has no such
    assert states(other) == {"lost": "published"}
    other.load_corpus(tmp_path / "corpus")
    assert states(other) == {"old": "published"}
    other.add_external_corpus("new", documents=["four five six"], wait=True)
    kill(other, pool, "replica-0")
    rejoined(other)
    wait_until(lambda: states(other) == {"new": "published", "old": "published"}, other.step)
    held = [each.corpus_tokens for each in other.replicas.on_all(RolloutEngine.status).values()]
    assert held[0] == held[1] > 100
    (tmp_path / "corpus").unlink()
    kill(other, pool, "replica-1")
    rejoined(other)
    wait_until(lambda: states(other) == {"new": "published", "old": "published"}, other.step)
    assert {each.name: each.error for each in other.external_corpora()} == {
        "new": None, "old": "replica-1 lacks it"
    }  # fmt: skip


def counters(cluster: RolloutCluster, name: str) -> list[float]:
    statuses = cluster.replicas.on_all(RolloutEngine.status).values()
    return [each.counters.get(f"corpus/{name}", 0.0) for each in statuses]


def test_each_replica_learns_what_the_others_committed(make, text_config):
    cluster, pool = make(3)
    kill(cluster, pool, "replica-1")  # and the one that takes its place
    rejoined(cluster)
    rollouts = generated(cluster)
    cluster.corpus_exchange.finish()
    submit_all(cluster, [[60, 61]], SamplingParams(max_new_tokens=1))
    drain(cluster)  # a step each replica that has one
    total = sum(len(each[0]) for each in rollouts.values())
    shared, waiting = counters(cluster, "shared_tokens"), counters(cluster, "learned_tokens")
    assert min(shared) > 0
    assert sum(shared) >= total
    for own, learned in zip(shared, waiting, strict=True):
        assert learned <= sum(shared) - own  # none of its own; an idle one learns when it steps
    assert sum(counters(cluster, "lost_rollouts")) == 0
    assert sum(counters(cluster, "unshared_rollouts")) == 0
    engine = RolloutEngine.from_config(text_config, always_drafts())
    assert rollouts == generated(engine)


def test_workers_without_a_corpus_have_nothing_to_share(make):
    cluster, _ = make(2, always_drafts("none"))
    generated(cluster)
    with pytest.raises(InvalidInputError, match="has no corpus"):
        cluster.add_external_corpus("texts", documents=["one two"])
