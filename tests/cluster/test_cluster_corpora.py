"""Replicas draft from what all committed, and have the same external corpora."""

from __future__ import annotations

import json
import random
import threading

import pytest

from rollout import ExternalState, RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError
from tests.cluster.thread_pool import ThreadReplica, intercept, kill
from tests.cluster.workload import always_drafts, drain, generated, poll_until, rejoined, submit_all
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


def on_each(cluster: RolloutCluster) -> list[dict[str, str]]:
    """States by name, of each replica. Nothing is told to publish while they are asked."""
    answers = cluster.replicas.on_all("external_corpora")
    return [{each.name: each.state.value for each in answers[name]} for name in sorted(answers)]


def states(cluster: RolloutCluster) -> dict[str, str]:
    return {each.name: each.state.value for each in cluster.external_corpora()}


def test_none_drafts_from_it_before_all_have_loaded_it(make):
    cluster, pool = make(2)
    opened = gated(pool.living["replica-1"])
    cluster.add_external_corpus("texts", **CHUNKS)
    submit_all(cluster)
    wait_until(lambda: on_each(cluster)[0] == {"texts": "ready"}, cluster.step)
    for _ in range(20):
        cluster.step()
    assert states(cluster) == {"texts": "loading"}
    assert on_each(cluster)[0] == {"texts": "ready"}
    opened.set()
    wait_until(lambda: cluster.status().corpora[0].state is ExternalState.PUBLISHED, cluster.step)
    assert on_each(cluster) == [{"texts": "published"}] * 2
    drain(cluster)


def test_none_is_published_where_it_is_not_loaded_however_they_come_and_go(make, text_config):
    """Corpora and replicas, at random, during generation."""
    cluster, pool = make(3, max_deaths_per_request=100)
    rng = random.Random(5)
    names: list[str] = []
    seen = 0

    def disturb() -> None:
        nonlocal seen
        if rng.random() < 0.05:
            rng.choice(list(pool.living.values())).kill()
        if names and rng.random() < 0.3:
            cluster.remove_external_corpus(names.pop(rng.randrange(len(names))))
        elif rng.random() < 0.5:
            names.append(cluster.add_external_corpus(token_chunks=[rng.choices(range(97), k=2000)]))
        found = on_each(cluster)
        assert all(each.keys() == set(names) for each in found)
        for name in names:
            on = {each[name] for each in found}
            if "published" in on:
                assert on <= {"ready", "published"}
                seen += 1

    submit_all(cluster)
    engine = RolloutEngine.from_config(text_config, always_drafts())
    expected = generated(engine)
    assert drain(cluster, disturb) == expected
    while not seen:  # a machine may have been too slow to publish any meanwhile
        cluster.step()
        disturb()
    rejoined(cluster)
    wait_until(lambda: states(cluster) == dict.fromkeys(names, "published"), cluster.step)


def test_on_request_it_waits_for_the_request(make):
    cluster, pool = make(2)
    opened = gated(pool.living["replica-1"])
    cluster.add_external_corpus("texts", **CHUNKS, publish="on_request")
    with pytest.raises(InvalidInputError, match="name='texts': is loading"):
        cluster.publish_external_corpus("texts")
    opened.set()
    cluster.corpora.wait("texts")
    assert states(cluster) == {"texts": "ready"}
    kill(cluster, pool, "replica-0")
    rejoined(cluster)
    wait_until(lambda: states(cluster) == {"texts": "ready"}, cluster.step)
    for _ in range(2):
        cluster.publish_external_corpus("texts")
    assert states(cluster) == {"texts": "published"}
    with pytest.raises(InvalidInputError, match="name='other': is unknown; there are texts"):
        cluster.publish_external_corpus("other")
    with pytest.raises(InvalidInputError, match="is unknown"):
        cluster.remove_external_corpus("other")
    with pytest.raises(InvalidInputError, match="publish='now'"):
        cluster.add_external_corpus("other", **CHUNKS, publish="now")


def test_a_corpus_that_one_replica_cannot_take_load_or_publish_is_on_none(make, tmp_path):
    cluster, pool = make(2)
    file, damaged = tmp_path / "texts.jsonl", tmp_path / "damaged.jsonl"
    file.write_text(json.dumps("one two three") + "\n")
    damaged.write_text("{not JSON\n")
    one = pool.living["replica-1"]
    one.call("add_external_corpus", "taken", documents=["one"]).result()
    with pytest.raises(InvalidInputError, match="is taken"):
        cluster.add_external_corpus("taken", documents=["two"])
    assert on_each(cluster)[0] == {}
    one.call("remove_external_corpus", "taken").result()

    # On this replica's host it is another file.
    intercept(one, "add_external_corpus", lambda _, kwargs: kwargs.update(file_path=str(damaged)))
    with pytest.raises(InvalidInputError, match=r"on replica-1: .*damaged"):
        cluster.add_external_corpus("texts", file_path=file, wait=True)
    assert on_each(cluster) == [{}, {}]
    cluster.add_external_corpus("texts", file_path=file)
    wait_until(lambda: states(cluster) == {"texts": "failed"})
    assert "replica-1" in cluster.external_corpora()[0].error
    cluster.remove_external_corpus("texts")
    assert states(cluster) == {}

    other, pool = make(2)
    refusal = InvalidInputError("name", "texts", "another")
    intercept(pool.living["replica-1"], "publish_external_corpus", lambda *_: refusal)
    with pytest.raises(InvalidInputError, match=r"could not be loaded: on replica-1: .*another"):
        other.add_external_corpus("texts", **CHUNKS, wait=True)
    assert on_each(other) == [{}, {}]


def test_configured_ones_are_published_together_too(make, tmp_path):
    code, bad = tmp_path / "code.jsonl", tmp_path / "bad.jsonl"
    code.write_text('"one two three"\n')
    bad.write_text("3\n")
    factory = worker_factory(
        "ngram",
        budget="fixed",
        calibration_seconds=0,
        corpus_bytes=1 << 20,
        external_corpora={"code": str(code), "bad": str(bad)},
    )
    cluster, pool = make(2, factory)
    assert on_each(cluster) == [{}, {}]  # they are begun by the first step
    generated(cluster)
    wait_until(lambda: states(cluster) == {"bad": "failed", "code": "published"}, cluster.step)
    cluster.remove_external_corpus("bad")
    cluster.remove_external_corpus("code")
    kill(cluster, pool, "replica-0")
    rejoined(cluster)
    assert on_each(cluster) == [{}, {}]


def test_a_file_is_saved_by_one_and_loaded_by_all_and_by_who_starts_later(make, tmp_path):
    cluster, pool = make(2)
    cluster.add_external_corpus("old", documents=["one two three"], wait=True)
    cluster.add_external_corpus("gone", documents=["one"], wait=True)
    generated(cluster)
    cluster.save_corpus(tmp_path / "corpus")
    other, pool = make(2)
    other.add_external_corpus("lost", documents=["seven"], wait=True)  # the file has no such
    other.load_corpus(tmp_path / "corpus")
    assert states(other) == {"old": "published", "gone": "published"}
    assert "budget" in other.learned()
    other.remove_external_corpus("gone")
    other.add_external_corpus("new", documents=["four five six"], wait=True)
    kill(other, pool, "replica-0")
    rejoined(other)
    assert states(other) == {"new": "published", "old": "published"}
    held = [each.corpus_tokens for each in other.replicas.on_all("status").values()]
    assert held[0] == held[1] > 100
    (tmp_path / "corpus").unlink()
    kill(other, pool, "replica-1")
    rejoined(other)
    found = {each.name: each for each in other.external_corpora()}
    assert (found["new"].state, found["old"].state) == ("published", "failed")
    assert "replica-1 could not load the file" in found["old"].error
    assert on_each(other) == [{"new": "published"}] * 2


def test_who_starts_has_what_was_added_and_not_what_was_removed_meanwhile(make, tmp_path):
    cluster, pool = make(2)
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps("one two three") + "\n")
    cluster.add_external_corpus("file", file_path=file, wait=True)
    cluster.add_external_corpus("old", documents=["one two three"], wait=True)
    kill(cluster, pool, "replica-0")
    poll_until(cluster, lambda: cluster.replicas._newcomers)
    assert "replica-0" not in cluster.replicas.joined
    cluster.add_external_corpus("new", documents=["four five six", "seven"])
    cluster.remove_external_corpus("old")
    rejoined(cluster)
    cluster.add_external_corpus("old", **CHUNKS, wait=True)
    wait_until(lambda: set(states(cluster).values()) == {"published"})
    for corpora in cluster.replicas.on_all("external_corpora").values():
        found = {each.name: each.num_tokens for each in corpora}
        assert found == {"file": 3, "new": 4, "old": 3}


def counters(cluster: RolloutCluster, name: str) -> list[float]:
    statuses = cluster.replicas.on_all("status").values()
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
