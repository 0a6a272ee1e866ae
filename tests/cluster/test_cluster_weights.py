"""Weight updates reach every replica or none, and who joins late gets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout import RolloutEngine, SamplingParams
from rollout.cluster import weights
from rollout.cluster.cluster import RolloutCluster
from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.weights.bucket import buckets
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.manifest import TensorSpec
from rollout.weights.shared_memory import SharedMemorySender
from tests.cluster.thread_pool import ThreadReplica, kill
from tests.cluster.workload import content, drain, key, ngram, rejoined
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.weight_transports import TensorSource, group_of

PROMPTS = [[3 + i, 10 + i, 11] for i in range(4)]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=20, seed=5, n=2, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def news(tmp_path_factory) -> list[Path]:
    """Folders of two other policies."""
    return [save_tiny_llama(tmp_path_factory.mktemp("policy"), seed=seed) for seed in (11, 12)]


@pytest.fixture(scope="module")
def tensors(news) -> list[Tensors]:
    return [load_file(folder / "model.safetensors") for folder in news]


@pytest.fixture(scope="module")
def wanted(config, news) -> list[dict]:
    """One engine's rollouts and digest with the weights of each policy, as version 1."""
    found = []
    for folder in news:
        engine = RolloutEngine.from_config(config, ngram())
        engine.update_weights_from_disk(folder)
        rollouts = {key(each): content(each) for each in engine.generate(PROMPTS, PARAMS)}
        found.append({"rollouts": rollouts, "digest": engine.weights_digest()})
    return found


@pytest.fixture
def make(make_cluster):
    return make_cluster


def generated(cluster: RolloutCluster) -> dict:
    for index, prompt in enumerate(PROMPTS):
        for sample in range(PARAMS.n):
            cluster.submit(prompt, PARAMS, prompt_index=index, sample_index=sample)
    return drain(cluster)


class Interceptor:
    """Stands between the cluster and one replica's calls of one method."""

    def __init__(self, replica: ThreadReplica, method: str, act: Callable[[int], object]) -> None:
        self._call, self._method, self._act = replica.call, method, act
        self.count = 0
        replica.call = self  # type: ignore[method-assign]

    def __call__(self, method: str, *args, **kwargs) -> Future:
        if method == self._method:
            self.count += 1
            error = self._act(self.count)
            if isinstance(error, Exception):
                answer: Future = Future()
                answer.set_exception(error)
                return answer
        return self._call(method, *args, **kwargs)


def by_collection(cluster, folder: Path, tensors: Tensors, **options) -> None:
    cluster.update_weights_from_tensor(tensors, **options)


def by_generator(cluster, folder: Path, tensors: Tensors, **options) -> None:
    cluster.update_weights_from_tensor(iter(tensors.items()), **options)


def by_buckets(cluster, folder: Path, tensors: Tensors, **options) -> None:
    stream = buckets(tensors.items(), 8192)
    cluster.update_weights_from_tensor(stream, load_format="flattened_bucket", **options)


def by_disk(cluster, folder: Path, tensors: Tensors, **options) -> None:
    cluster.update_weights_from_disk(folder, **options)


def by_handles(cluster, folder: Path, tensors: Tensors, **options) -> None:
    with SharedMemorySender(8192) as sender:
        cluster.update_weights_from_ipc(sender.handles(tensors.items()), **options)


def by_parts(cluster, folder: Path, tensors: Tensors, **options) -> None:
    manifest = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    cluster.begin_weight_update(manifest, **options)
    names = list(tensors)
    for own in (names[:3], names[3:]):
        cluster.update_weights_from_tensor({name: tensors[name] for name in own})
    cluster.end_weight_update()


def by_group(cluster, folder: Path, tensors: Tensors, **options) -> None:
    with group_of(cluster, 1 + len(cluster.replicas.joined)) as (group, threads):
        sender = DistributedSender(group, bucket_bytes=8192)
        source = TensorSource(tensors)
        sending = threads.submit(sender.send, source)
        cluster.update_weights_from_distributed(**sender.arguments(source), **options)
        sending.result(HANG_SECONDS)


TRANSPORTS = [by_collection, by_generator, by_buckets, by_disk, by_handles, by_parts, by_group]


@pytest.mark.parametrize("update", TRANSPORTS)
def test_every_transport_reaches_every_replica(make, news, tensors, wanted, update):
    cluster, _ = make(2)
    before = cluster.weights_digest()
    update(cluster, news[0], tensors[0])
    assert cluster.weights_digest() == wanted[0]["digest"] != before
    assert cluster.weight_version == 1
    assert generated(cluster) == wanted[0]["rollouts"]
    update(cluster, news[1], tensors[1], weight_version=9)
    assert cluster.weights_digest() == wanted[1]["digest"]
    assert cluster.weight_version == cluster.status().weight_versions["target"] == 9
    name, tensor = next(iter(tensors[1].items()))
    assert cluster.get_weights_by_name(name, 3) == tensor.flatten()[:3].tolist()


@pytest.mark.parametrize("update", TRANSPORTS)
def test_what_cannot_fit_is_refused_before_a_byte_moves(make, tmp_path, tensors, update):
    cluster, _ = make(2)
    before = cluster.weights_digest()
    wrong = dict(tensors[0])
    wrong["model.norm.weight"] = torch.ones(7)
    save_file(wrong, tmp_path / "model.safetensors")
    if update in (by_generator, by_buckets, by_handles):  # known only as it comes: first of all
        wrong = {"model.norm.weight": wrong.pop("model.norm.weight"), **wrong}
    with pytest.raises(InvalidInputError, match=r"wrong shape: model\.norm\.weight"):
        update(cluster, tmp_path, wrong)
    assert cluster.weights_digest() == before
    assert cluster.can_run
    assert len(generated(cluster)) == 8


def test_one_replica_that_refuses_keeps_the_old_weights_on_all(make, tensors):
    cluster, pool = make(3)
    before = cluster.weights_digest()
    Interceptor(pool.living["replica-1"], "begin_weight_update", lambda n: InvalidInputError(
        "named_tensors", 1, "unlike the others'"))  # fmt: skip
    with pytest.raises(InvalidInputError, match="unlike the others"):
        cluster.update_weights_from_tensor(tensors[0])
    assert cluster.can_run
    assert cluster.weights_digest() == before
    assert len(generated(cluster)) == 8


def test_a_failure_halfway_tears_all_until_a_full_update(make, tensors, wanted):
    cluster, pool = make(2)
    Interceptor(
        pool.living["replica-1"],
        "update_weights_from_bucket",
        lambda n: InvalidInputError("bucket", n, "broken link") if n == 2 else None,
    )
    cluster.begin_weight_update()
    first, *others = tensors[0].items()
    cluster.update_weights_from_tensor([first])
    with pytest.raises(InvalidInputError, match="broken link"):
        cluster.update_weights_from_tensor(others)
    assert "stopped after" in cluster.unavailable_reason
    assert not cluster.can_run
    cluster.submit(PROMPTS[0], PARAMS)
    with pytest.raises(WeightUpdateError, match="torn"):
        cluster.step()
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        cluster.end_weight_update()
    cluster.update_weights_from_tensor(tensors[0])
    assert cluster.weights_digest() == wanted[0]["digest"]
    assert len(drain(cluster)) == 1


def test_a_generator_that_raises_tears_all_as_it_does_one(make, tensors):
    cluster, _ = make(2)

    def breaking():
        for index, pair in enumerate(tensors[0].items()):
            if index == 4:
                raise RuntimeError("the trainer is gone")
            yield pair

    with pytest.raises(RuntimeError, match="the trainer is gone"):
        cluster.update_weights_from_tensor(breaking())
    assert cluster.can_run  # one bucket holds all of this model: none was sent
    with pytest.raises(InvalidInputError, match="missing"):
        cluster.update_weights_from_tensor(iter(list(tensors[0].items())[:4]))
    assert not cluster.can_run


def test_a_replica_that_cannot_commit_what_another_did_is_replaced(make, tensors, wanted):
    cluster, pool = make(2)
    broken = pool.living["replica-1"]
    Interceptor(broken, "end_weight_update", lambda n: RuntimeError("out of memory"))
    cluster.update_weights_from_tensor(tensors[0])
    assert broken.is_dead
    while cluster.replicas.joined.get("replica-1") is broken:
        cluster.replicas.poll(0.01)
    rejoined(cluster)
    assert cluster.weights_digest() == wanted[0]["digest"]
    assert generated(cluster) == wanted[0]["rollouts"]


@pytest.mark.parametrize("dies_in", ["begin_weight_update", "update_weights_from_bucket",
                                     "end_weight_update"])  # fmt: skip
def test_a_replica_that_dies_during_an_update_comes_back_with_it(make, tensors, wanted, dies_in):
    cluster, pool = make(2)
    dying = pool.living["replica-0"]
    Interceptor(dying, dies_in, lambda n: dying.kill())
    cluster.update_weights_from_tensor(tensors[0])
    assert dying.is_dead
    assert generated(cluster) == wanted[0]["rollouts"]
    rejoined(cluster)
    assert cluster.weights_digest() == wanted[0]["digest"]
    statuses = cluster.replicas.on_all("status").values()
    assert [each.weight_versions for each in statuses] == [{"target": 1}] * 2
    kill(cluster, pool, "replica-1")  # and it hands them on
    rejoined(cluster)
    assert cluster.weights_digest() == wanted[0]["digest"]


def test_a_late_joiner_waits_for_the_update_under_way(make, tensors, wanted):
    cluster, pool = make(2)
    cluster.begin_weight_update()
    names = list(tensors[0])
    cluster.update_weights_from_tensor({name: tensors[0][name] for name in names[:3]})
    kill(cluster, pool, "replica-0")
    for _ in range(50):
        cluster.replicas.poll(0.01)
    assert list(cluster.replicas.joined) == ["replica-1"]
    cluster.update_weights_from_tensor({name: tensors[0][name] for name in names[3:]})
    cluster.end_weight_update()
    rejoined(cluster)
    assert cluster.weights_digest() == wanted[0]["digest"]


def test_weights_that_died_with_the_last_replica_are_missed_loudly(make, tensors, wanted):
    cluster, pool = make(2)
    cluster.update_weights_from_tensor(tensors[0])
    for name in pool.names:
        pool.living[name].kill()
    cluster.submit(PROMPTS[0], PARAMS)
    while not cluster.weights.sync.why_lost:
        cluster.replicas.poll(0.01)
    assert "every replica that had the updated weights died" in cluster.unavailable_reason
    with pytest.raises(WeightUpdateError, match="every tensor of the target"):
        cluster.step()
    wait_until(lambda: cluster.replicas.all_joined, lambda: cluster.replicas.poll(0.01))
    cluster.update_weights_from_tensor(tensors[0])
    assert cluster.weights_digest() == wanted[0]["digest"]
    assert len(drain(cluster)) == 1


def test_a_silent_update_counts_as_abandoned_everywhere(make, tensors):
    cluster, _ = make(2)
    cluster.begin_weight_update(timeout=0.05)
    time.sleep(0.1)
    assert cluster.can_run
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        cluster.end_weight_update()
    cluster.update_weights_from_tensor(tensors[0])


def test_a_group_waits_for_all_as_long_as_it_is_told_to(make):
    cluster, pool = make(2)
    dead = pool.living["replica-1"]
    dead.kill()
    cluster.replicas.wait_until_gone(dead)
    with pytest.raises(WeightUpdateError, match="not all replicas are there after 0 s"):
        cluster.init_weights_update_group("127.0.0.1", 1, 1, 3, timeout=0.0)


def test_a_group_does_not_know_those_who_came_later(make, tensors):
    cluster, pool = make(2)
    with group_of(cluster, 3) as (group, _):
        arguments = DistributedSender(group).arguments(TensorSource(tensors[0]))
        kill(cluster, pool, "replica-1")
        rejoined(cluster)
        with pytest.raises(WeightUpdateError, match="replica-1 came after the group"):
            cluster.update_weights_from_distributed(**arguments)
        assert cluster.can_run
    with pytest.raises(InvalidInputError, match="no group of this cluster"):
        cluster.update_weights_from_distributed(**arguments)


def test_options_and_calls_out_of_turn_are_refused(make, tensors, monkeypatch):
    cluster, _ = make(1)
    with pytest.raises(InvalidInputError, match="weight_version=0"):
        cluster.begin_weight_update(weight_version=0)
    with pytest.raises(InvalidInputError, match="is no option"):
        cluster.update_weights_from_tensor(tensors[0], unknown=1)
    cluster.begin_weight_update()
    with pytest.raises(WeightUpdateError, match="under way"):
        cluster.begin_weight_update()
    with pytest.raises(InvalidInputError, match="set by begin_weight_update"):
        cluster.update_weights_from_tensor(tensors[0], partial=True)
    cluster.abandon_weight_update()
    assert cluster.can_run
    nan = {name: tensor * float("nan") for name, tensor in tensors[0].items()}
    with pytest.raises(InvalidInputError, match="NaN"):
        cluster.update_weights_from_tensor(nan, check_finite=True)
    monkeypatch.setattr(weights, "CACHED_BUCKET_BYTES", 8192)  # of which many are sent
    nan_last = tensors[0] | {max(nan): nan[max(nan)]}
    packed = list(buckets(nan_last.items(), 1 << 30))
    with pytest.raises(InvalidInputError, match="NaN"):
        cluster.update_weights_from_tensor(
            packed, load_format="flattened_bucket", check_finite=True
        )
    assert cluster.can_run


def test_sleep_and_wake_reach_all_and_those_who_come_meanwhile(make, tensors, wanted):
    cluster, pool = make(2)
    cluster.update_weights_from_tensor(tensors[0])
    assert cluster.release_memory(["weights", "kv_cache"])["weights"] > 0
    kill(cluster, pool, "replica-0")
    for _ in range(50):
        cluster.replicas.poll(0.01)
    assert not cluster.can_run
    cluster.resume_memory()
    rejoined(cluster)
    assert cluster.can_run
    assert cluster.weights_digest() == wanted[0]["digest"]
    assert generated(cluster) == wanted[0]["rollouts"]


def test_requests_in_flight_go_on_with_the_new_weights(make, tensors):
    cluster, pool = make(2)
    long = SamplingParams(temperature=0.9, max_new_tokens=450, ignore_eos=True)
    with pool.held():
        requests = [cluster.submit(prompt, long) for prompt in PROMPTS]
        for request in requests:
            cluster.watch(request.request_id)  # their tokens come at once
        wait_until(lambda: any(request.token_ids for request in requests), cluster.step)
        cluster.update_weights_from_tensor(tensors[0])
    rollouts = []
    while cluster.has_unfinished:
        rollouts += cluster.step()
    assert all(each.weight_versions == sorted(each.weight_versions) for each in rollouts)
    assert any(set(each.weight_versions) == {0, 1} for each in rollouts)  # it was found running
    with pool.held():
        for prompt in PROMPTS:
            cluster.submit(prompt, long)
        cluster.update_weights_from_tensor(tensors[1], abort_all_requests=True)
    rollouts = cluster.take_ended()
    assert [each.finish_reason.value for each in rollouts] == ["abort"] * 4
    assert not cluster.has_unfinished


def test_replicas_that_come_during_the_update_that_heals_wait_for_its_end(make, tensors, wanted):
    cluster, pool = make(2)
    cluster.update_weights_from_tensor(tensors[0])
    for replica in list(pool.living.values()):
        replica.kill()
    wait_until(
        lambda: cluster.weights.sync.why_lost and cluster.replicas.joined,
        lambda: cluster.replicas.poll(0.01),
    )
    some = next(iter(cluster.replicas.joined))
    (late,) = set(pool.names) - {some}
    pool.living[late].kill()  # so that it starts after the update began
    names = list(tensors[1])
    cluster.begin_weight_update()
    cluster.update_weights_from_tensor({name: tensors[1][name] for name in names[:3]})
    for _ in range(100):
        cluster.replicas.poll(0.01)
    cluster.update_weights_from_tensor({name: tensors[1][name] for name in names[3:]})
    cluster.end_weight_update()
    rejoined(cluster)
    assert cluster.weights_digest() == wanted[1]["digest"]
    assert cluster.weight_version == 2  # no policy shares its number with the one that was lost
    statuses = cluster.replicas.on_all("status").values()
    assert [each.weight_versions for each in statuses] == [{"target": 2}] * 2


def test_an_update_whose_replicas_all_die_once_they_committed_has_failed(make, tensors):
    cluster, pool = make(2)
    for replica in pool.living.values():
        Interceptor(
            replica,
            "status",
            lambda n: [each.kill() for each in list(pool.living.values())] and None,
        )
    with pytest.raises(WeightUpdateError, match="every replica died"):
        cluster.update_weights_from_tensor(tensors[0])
    cluster.submit(PROMPTS[0], PARAMS)
    wait_until(lambda: cluster.replicas.all_joined, lambda: cluster.replicas.poll(0.01))
    assert "every replica that had the updated weights died" in cluster.unavailable_reason
    with pytest.raises(WeightUpdateError, match="every tensor of the target"):
        cluster.score_with_extras(PROMPTS[0], [5, 6])


def test_an_update_is_not_silent_while_it_loads(make, tensors, monkeypatch):
    cluster, _ = make(1)
    now = [0.0]

    def share(value):
        now[0] += 400
        return value

    monkeypatch.setattr("rollout.cluster.weights.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(cluster.replicas, "share", share)
    cluster.begin_weight_update(timeout=300.0)
    cluster.update_weights_from_tensor(tensors[0])
    cluster.end_weight_update()
    cluster.update_weights_from_tensor(tensors[1])
    assert cluster.weight_version == 2


def test_a_newcomer_that_begins_to_join_anew_is_not_brought_the_same_twice(make, tensors, wanted):
    cluster, pool = make(2)
    cluster.update_weights_from_tensor(tensors[0])
    kill(cluster, pool, "replica-0")
    born = len(pool.lives)
    asked, opened = [], threading.Event()
    Interceptor(
        pool.living["replica-1"], "read_weights", lambda n: opened.wait(HANG_SECONDS) and None
    )
    while "replica-0" not in cluster.replicas.joined:
        if not asked and cluster.weights.sync.is_busy:
            asked.append(cluster.weights.sync.try_again())
            opened.set()
        cluster.replicas.poll(0.01)
    assert asked
    assert len(pool.lives) == born  # none was refused and started anew
    assert cluster.weights_digest() == wanted[0]["digest"]
    assert cluster.corpus_exchange._has_corpus
