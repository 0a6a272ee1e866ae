"""External corpora of a cluster: on every replica or on none, and published together."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import pytest

from rollout import ExternalState, RolloutEngine
from rollout.cluster.cluster import RolloutCluster
from rollout.engine.draft_corpus import ExternalCorpus
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError
from tests.cluster.thread_pool import ThreadReplica, kill
from tests.cluster.workload import (
    PARAMS,
    PROMPTS,
    always_drafts,
    content,
    drain,
    key,
    rejoined,
    submit_all,
)
from tests.helpers.gated_list import GatedList
from tests.helpers.hang import wait_until

IN_MEMORY = {ExternalState.READY, ExternalState.PUBLISHED}


class Gate:
    """Holds up what a replica loads."""

    def __init__(self, replica: ThreadReplica) -> None:
        self.opened = threading.Event()
        call = replica.call

        def gated(method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "add_external_corpus":
                kwargs["token_chunks"] = GatedList(kwargs["token_chunks"], self.opened)
            return call(method, *args, **kwargs)

        replica.call = gated  # type: ignore[method-assign]


def on_each(cluster: RolloutCluster) -> dict[str, dict[str, ExternalState]]:
    """By replica and name. Nothing is told to publish while they are asked."""
    answers = cluster.replicas.on_all("external_corpora")
    return {replica: {each.name: each.state for each in on} for replica, on in answers.items()}


def states(cluster: RolloutCluster) -> dict[str, str]:
    return {each.name: each.state.value for each in cluster.external_corpora()}


def only(cluster: RolloutCluster) -> ExternalCorpus:
    (corpus,) = cluster.external_corpora()
    return corpus


def test_none_drafts_from_it_before_all_have_loaded_it(make):
    cluster, pool = make(2)
    gate = Gate(pool.living["replica-1"])
    cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]])
    submit_all(cluster)
    wait_until(lambda: on_each(cluster)["replica-0"]["texts"] is ExternalState.READY, cluster.step)
    for _ in range(20):
        cluster.step()
    assert states(cluster) == {"texts": "loading"}
    assert on_each(cluster)["replica-0"]["texts"] is ExternalState.READY
    gate.opened.set()
    wait_until(lambda: cluster.status().corpora[0].state is ExternalState.PUBLISHED, cluster.step)
    assert {each["texts"] for each in on_each(cluster).values()} == {ExternalState.PUBLISHED}
    drain(cluster)


def test_one_that_dies_while_it_loads_holds_up_nobody_for_good(make):
    cluster, pool = make(2)
    gate = Gate(pool.living["replica-1"])
    cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]])
    wait_until(lambda: on_each(cluster)["replica-0"]["texts"] is ExternalState.READY, cluster.step)
    kill(cluster, pool, "replica-1")
    gate.opened.set()  # for its thread, which nobody hears of any more
    wait_until(lambda: only(cluster).state is ExternalState.PUBLISHED, cluster.step)
    rejoined(cluster)
    assert {each["texts"] for each in on_each(cluster).values()} == {ExternalState.PUBLISHED}


def test_one_that_starts_joins_when_it_has_published_what_the_others_have(make):
    cluster, pool = make(2)
    cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]], wait=True)
    kill(cluster, pool, "replica-1")
    gate = Gate(pool.living["replica-1"])
    wait_until(lambda: bool(cluster.replicas._newcomers), cluster.step)
    submit_all(cluster)
    for _ in range(20):
        cluster.step()
    assert "replica-1" not in cluster.replicas.joined
    assert states(cluster) == {"texts": "published"}
    gate.opened.set()
    rejoined(cluster)
    assert on_each(cluster)["replica-1"]["texts"] is ExternalState.PUBLISHED
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
        assert all(each.keys() == set(names) for each in found.values())
        for name in names:
            on = {each[name] for each in found.values()}
            if ExternalState.PUBLISHED in on:
                assert on <= IN_MEMORY
                seen += 1

    submit_all(cluster)
    engine = RolloutEngine.from_config(text_config, always_drafts())
    expected = {key(each): content(each) for each in engine.generate(PROMPTS, PARAMS)}
    assert drain(cluster, disturb) == expected
    while not seen:  # a machine may have been too slow to publish any meanwhile
        cluster.step()
        disturb()
    rejoined(cluster)
    wait_until(lambda: states(cluster) == dict.fromkeys(names, "published"), cluster.step)


def test_on_request_it_waits_for_the_request(make):
    cluster, pool = make(2)
    gate = Gate(pool.living["replica-1"])
    cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]], publish="on_request")
    with pytest.raises(InvalidInputError, match="name='texts': is loading"):
        cluster.publish_external_corpus("texts")
    gate.opened.set()
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
    with pytest.raises(InvalidInputError, match="publish='now'"):
        cluster.add_external_corpus("other", token_chunks=[[5]], publish="now")


def test_one_that_cannot_publish_it_takes_it_from_all(make):
    cluster, pool = make(2)
    call = pool.living["replica-1"].call

    def damaged(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "publish_external_corpus":
            args = ("another",)
        return call(method, *args, **kwargs)

    pool.living["replica-1"].call = damaged
    with pytest.raises(InvalidInputError, match=r"could not be loaded: on replica-1: .*another"):
        cluster.add_external_corpus("texts", token_chunks=[[5, 6, 7]], wait=True)
    assert on_each(cluster) == {"replica-0": {}, "replica-1": {}}


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
    assert all(each == {} for each in on_each(cluster).values())  # they are begun by the first step
    submit_all(cluster)
    drain(cluster)
    wait_until(lambda: states(cluster) == {"bad": "failed", "code": "published"}, cluster.step)
    cluster.remove_external_corpus("bad")
    cluster.remove_external_corpus("code")
    kill(cluster, pool, "replica-0")
    rejoined(cluster)
    assert on_each(cluster) == {"replica-0": {}, "replica-1": {}}


def test_a_file_is_saved_by_one_and_loaded_by_all_and_by_who_starts_later(make, tmp_path):
    cluster, pool = make(2)
    cluster.add_external_corpus("old", documents=["one two three"], wait=True)
    cluster.add_external_corpus("gone", documents=["one"], wait=True)
    submit_all(cluster)
    drain(cluster)
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
    assert on_each(other) == {
        "replica-0": {"new": "published"},
        "replica-1": {"new": "published"},
    }


def test_external_corpora_come_to_all_and_to_those_who_start_later(make, tmp_path):
    cluster, pool = make(2)
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps("one two three") + "\n")
    cluster.add_external_corpus("file", file_path=file, wait=True)
    cluster.add_external_corpus("texts", documents=["four five six", "seven"], wait=True)
    name = cluster.add_external_corpus(token_chunks=[[5, 6, 7], [8]], wait=True)
    assert {each.name for each in cluster.external_corpora()} == {"file", "texts", name}
    kill(cluster, pool, "replica-0")
    rejoined(cluster)
    wait_until(
        lambda: {each.state for each in cluster.external_corpora()} == {ExternalState.PUBLISHED}
    )
    for corpora in cluster.replicas.on_all("external_corpora").values():
        assert sorted(each.num_tokens for each in corpora) == [3, 4, 4]
    cluster.remove_external_corpus("texts")
    cluster.remove_external_corpus(name)
    kill(cluster, pool, "replica-1")
    rejoined(cluster)
    assert [each.name for each in cluster.external_corpora()] == ["file"]


def test_a_corpus_one_replica_cannot_take_is_on_none(make):
    cluster, pool = make(2)
    pool.living["replica-1"].call("add_external_corpus", "taken", documents=["one"]).result()
    with pytest.raises(InvalidInputError, match="is taken"):
        cluster.add_external_corpus("taken", documents=["two"])
    assert cluster.replicas.on_all("external_corpora")["replica-0"] == []
    with pytest.raises(InvalidInputError, match="is unknown"):
        cluster.remove_external_corpus("nothing")


def test_a_load_that_fails_on_one_is_failed_on_all(make, tmp_path):
    cluster, pool = make(2)
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps("one two three") + "\n")
    call = pool.living["replica-1"].call

    def other_file(method, *args, **kwargs):
        """On this replica's host it is another file."""
        if method == "add_external_corpus":
            other = tmp_path / "damaged.jsonl"
            other.write_text("{not JSON\n")
            kwargs["file_path"] = str(other)
        return call(method, *args, **kwargs)

    pool.living["replica-1"].call = other_file
    with pytest.raises(InvalidInputError, match=r"on replica-1: .*damaged"):
        cluster.add_external_corpus("texts", file_path=file, wait=True)
    assert cluster.external_corpora() == []
    assert all(each == [] for each in cluster.replicas.on_all("external_corpora").values())
    cluster.add_external_corpus("texts", file_path=file)
    wait_until(lambda: cluster.external_corpora()[0].state is ExternalState.FAILED)
    assert "replica-1" in cluster.external_corpora()[0].error
    cluster.remove_external_corpus("texts")
    assert cluster.external_corpora() == []


def test_who_starts_meanwhile_has_what_was_added_and_not_what_was_removed(make):
    cluster, pool = make(2)
    cluster.add_external_corpus("old", documents=["one two three"], wait=True)
    kill(cluster, pool, "replica-0")
    while not cluster.replicas._newcomers:
        cluster.replicas.poll(0.01)
    assert "replica-0" not in cluster.replicas.joined
    cluster.add_external_corpus("new", documents=["four five six"])
    cluster.remove_external_corpus("old")
    rejoined(cluster)
    cluster.add_external_corpus("old", documents=["seven"], wait=True)
    for corpora in cluster.replicas.on_all("external_corpora").values():
        assert [each.name for each in corpora] == ["new", "old"]
