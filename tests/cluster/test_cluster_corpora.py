"""Corpora of a cluster: what one replica commits all draft from; external ones are on all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from rollout import ExternalState, RolloutEngine, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.errors import InvalidInputError
from rollout.specs import worker_factory
from tests.cluster.thread_pool import ThreadPool
from tests.cluster.workload import content, drain, key, submit_all
from tests.helpers.text_model import save_text_model

pytestmark = pytest.mark.timeout(120)

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=60, ignore_eos=True, n=2)
PROMPTS = [[5 + i, 6, 7] for i in range(8)]
MakeCluster = Callable[..., tuple[RolloutCluster, ThreadPool]]


@pytest.fixture(scope="module")
def text_config(tmp_path_factory) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(save_text_model(tmp_path_factory.mktemp("text")))),
        memory=MemoryConfig(max_kv_tokens=2048),
        scheduler=SchedulerConfig(max_running=4, max_step_tokens=64),
        num_threads=1,
    )


def factory(spec: str = "ngram"):
    options = {"budget": "fixed", "calibration_seconds": 0, "corpus_bytes": 1 << 20}
    return worker_factory(spec, **(options if spec == "ngram" else {}))


@pytest.fixture
def make(text_config) -> Iterator[MakeCluster]:
    made: list[RolloutCluster] = []

    def make(replicas: int = 2, spec: str = "ngram", **options):
        pool = ThreadPool(text_config, factory(spec), [f"replica-{i}" for i in range(replicas)])
        settings = ClusterConfig(
            kind=ClusterKind.ray, replicas=replicas, **({"share_seconds": 0.005} | options)
        )
        made.append(RolloutCluster(text_config, settings, pool))
        return made[-1], pool

    yield make
    for cluster in made:
        cluster.close()


def kill(cluster: RolloutCluster, pool: ThreadPool, name: str) -> None:
    dead = pool.living[name]
    dead.kill()
    cluster.members.wait_until_gone(dead)


def rejoined(cluster: RolloutCluster) -> None:
    deadline = time.monotonic() + 60
    while not cluster.members.all_joined:
        cluster.step()
        assert time.monotonic() < deadline


def counters(cluster: RolloutCluster, name: str) -> list[float]:
    statuses = cluster.members.on_all("status").values()
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
    engine = RolloutEngine.from_config(text_config, factory())
    assert rollouts == {key(each): content(each) for each in engine.generate(PROMPTS, PARAMS)}


def accept_length(cluster: RolloutCluster) -> float:
    """Of the rollouts of one epoch."""
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
    cluster, _ = make(2, spec="none")
    submit_all(cluster, PROMPTS, PARAMS)
    assert len(drain(cluster)) == 16
    assert cluster.corpus_exchange.rounds == 0
    with pytest.raises(InvalidInputError, match="has no corpus"):
        cluster.add_external_corpus("texts", documents=["one two"])


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
    deadline = time.monotonic() + 30
    while {each.state for each in cluster.external_corpora()} != {ExternalState.PUBLISHED}:
        assert time.monotonic() < deadline
    for corpora in cluster.members.on_all("external_corpora").values():
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
    assert cluster.members.on_all("external_corpora")["replica-0"] == []
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
    assert all(each == [] for each in cluster.members.on_all("external_corpora").values())
    cluster.add_external_corpus("texts", file_path=file)
    deadline = time.monotonic() + 30
    while (state := cluster.external_corpora()[0]).state is not ExternalState.FAILED:
        assert time.monotonic() < deadline
    assert "replica-1" in state.error
    cluster.remove_external_corpus("texts")
    assert cluster.external_corpora() == []


def test_a_corpus_is_saved_by_one_and_loaded_by_all(make, tmp_path):
    cluster, _ = make(2)
    submit_all(cluster, PROMPTS, PARAMS)
    drain(cluster)
    cluster.save_corpus(tmp_path / "corpus")
    other, _ = make(2)
    other.load_corpus(tmp_path / "corpus")
    held = [each.corpus_tokens for each in other.members.on_all("status").values()]
    assert held[0] == held[1] > 0
    assert "budget" in other.learned()


def test_who_starts_meanwhile_has_what_was_added_and_not_what_was_removed(make):
    cluster, pool = make(2)
    cluster.add_external_corpus("old", documents=["one two three"], wait=True)
    kill(cluster, pool, "replica-0")
    while not cluster.members._newcomers:
        cluster.members.attend(0.01)
    assert "replica-0" not in cluster.members.joined
    cluster.add_external_corpus("new", documents=["four five six"])
    cluster.remove_external_corpus("old")
    rejoined(cluster)
    cluster.add_external_corpus("old", documents=["seven"], wait=True)
    for corpora in cluster.members.on_all("external_corpora").values():
        assert [each.name for each in corpora] == ["new", "old"]
