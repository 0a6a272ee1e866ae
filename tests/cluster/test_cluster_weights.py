"""Weight updates reach every replica or none, and who joins late gets them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.cluster import weights
from rollout.cluster.cluster import RolloutCluster
from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.weights.bucket import buckets
from tests.cluster.thread_pool import intercept, kill
from tests.cluster.workload import drain, generated, ngram, poll_until, rejoined
from tests.helpers.hang import wait_until
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.weight_transports import arguments, group_of, opened

PROMPTS = [[3 + i, 10 + i, 11] for i in range(4)]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=20, seed=5, n=2, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Policy:
    """Tensors, and one engine's rollouts and digest with them as version 1."""

    tensors: Tensors
    rollouts: dict
    digest: str


@pytest.fixture(scope="module")
def policies(config, tmp_path_factory) -> list[Policy]:
    """Two policies other than the checkpoint's."""
    found = []
    for seed in (11, 12):
        folder = save_tiny_llama(tmp_path_factory.mktemp("policy"), seed=seed)
        engine = RolloutEngine.from_config(config, ngram())
        engine.update_weights_from_disk(folder)
        rollouts = generated(engine, PROMPTS, PARAMS)
        tensors = load_file(folder / "model.safetensors")
        found.append(Policy(tensors, rollouts, engine.weights_digest()))
    return found


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    pairs = list(tensors.items())
    return dict(pairs[:3]), dict(pairs[3:])


def look_around(cluster: RolloutCluster) -> None:
    for _ in range(50):
        cluster.replicas.poll(0.01)


@pytest.mark.parametrize("kind", ["generator", "disk", "shared_memory", "distributed"])
def test_an_update_reaches_every_replica_or_none(make_cluster, tmp_path, policies, kind):
    cluster, _ = make_cluster(2)
    with opened(kind, cluster, tmp_path / "new", world_size=3) as update:
        assert update(policies[0].tensors).stored == {"target": len(policies[0].tensors)}
        assert cluster.weights_digest() == policies[0].digest
        assert cluster.weight_version == 1
        assert generated(cluster, PROMPTS, PARAMS) == policies[0].rollouts
        wrong = {"model.norm.weight": torch.ones(7), **policies[1].tensors}  # the first of all
        wrong["model.norm.weight"] = torch.ones(7)
        with pytest.raises(InvalidInputError, match=r"wrong shape: model\.norm\.weight"):
            update(wrong)
        assert cluster.can_run
        assert cluster.weights_digest() == policies[0].digest
        update(policies[1].tensors, weight_version=9)
    assert cluster.weights_digest() == policies[1].digest
    assert cluster.weight_version == cluster.status().weight_versions["target"] == 9
    name, tensor = next(iter(policies[1].tensors.items()))
    assert cluster.get_weights_by_name(name, 3) == tensor[:3].tolist()


def test_the_check_of_an_update_is_made_on_every_replica(make_cluster, policies):
    cluster, _ = make_cluster(2)
    of_one, of_other = cluster.check_weights("checksum")
    assert of_one == of_other
    cluster.check_weights("snapshot")
    cluster.check_weights("reset_tensors")
    assert "the weights were reset" in cluster.unavailable_reason
    cluster.update_weights_from_tensor(policies[0].tensors)
    with pytest.raises(WeightUpdateError, match="differ from the snapshot"):
        cluster.check_weights("compare")
    cluster.check_weights("snapshot")
    cluster.check_weights("compare")
    assert generated(cluster, PROMPTS, PARAMS) == policies[0].rollouts


def test_one_replica_that_refuses_keeps_the_old_weights_on_all(make_cluster, policies):
    cluster, pool = make_cluster(3)
    before = cluster.weights_digest()
    refusal = InvalidInputError("named_tensors", 1, "unlike the others'")
    intercept(pool.living["replica-1"], "begin_weight_update", lambda *_: refusal)
    with pytest.raises(InvalidInputError, match="unlike the others"):
        cluster.update_weights_from_tensor(policies[0].tensors)
    assert cluster.can_run
    assert cluster.weights_digest() == before


def test_a_failure_halfway_tears_all_until_a_full_update(make_cluster, policies):
    cluster, pool = make_cluster(2)
    errors = iter([None, InvalidInputError("bucket", 2, "broken link")])
    intercept(pool.living["replica-1"], "update_weights", lambda *_: next(errors, None))
    cluster.begin_weight_update()
    first, others = halves(policies[0].tensors)
    cluster.update_weights_from_tensor(first)
    with pytest.raises(InvalidInputError, match="broken link"):
        cluster.update_weights_from_tensor(others)
    assert "stopped after" in cluster.unavailable_reason
    assert not cluster.can_run
    cluster.submit(PROMPTS[0], PARAMS)
    with pytest.raises(WeightUpdateError, match="torn"):
        cluster.step()
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        cluster.end_weight_update()
    cluster.update_weights_from_tensor(policies[0].tensors)
    assert cluster.weights_digest() == policies[0].digest
    assert len(drain(cluster)) == 1


def test_a_replica_that_cannot_commit_what_another_did_is_replaced(make_cluster, policies):
    cluster, pool = make_cluster(2)
    broken = pool.living["replica-1"]
    intercept(broken, "end_weight_update", lambda *_: RuntimeError("out of memory"))
    cluster.update_weights_from_tensor(policies[0].tensors)
    assert broken.is_dead
    poll_until(cluster, lambda: cluster.replicas.joined.get("replica-1") is not broken)
    rejoined(cluster)
    assert cluster.weights_digest() == policies[0].digest
    assert generated(cluster, PROMPTS, PARAMS) == policies[0].rollouts


@pytest.mark.parametrize("dies_in", ["begin_weight_update", "update_weights", "end_weight_update"])
def test_a_replica_that_dies_during_an_update_comes_back_with_it(make_cluster, policies, dies_in):
    cluster, pool = make_cluster(2)
    dying = pool.living["replica-0"]
    intercept(dying, dies_in, lambda *_: dying.kill())
    cluster.update_weights_from_tensor(policies[0].tensors)
    assert dying.is_dead
    assert generated(cluster, PROMPTS, PARAMS) == policies[0].rollouts
    rejoined(cluster)
    assert cluster.weights_digest() == policies[0].digest
    statuses = cluster.replicas.on_all(RolloutEngine.status).values()
    assert [each.weight_versions for each in statuses] == [{"target": 1}] * 2
    kill(cluster, pool, "replica-1")  # and it hands them on
    rejoined(cluster)
    assert cluster.weights_digest() == policies[0].digest


def test_an_update_that_is_silent_for_its_timeout_is_abandoned(make_cluster, policies, monkeypatch):
    cluster, _ = make_cluster(1)
    now = [0.0]
    monkeypatch.setattr("rollout.cluster.weights.time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster.begin_weight_update(timeout=300.0)
    cluster.update_weights_from_tensor(halves(policies[1].tensors)[0])
    now[0] += 301
    assert not cluster.can_run
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        cluster.end_weight_update()
    cluster.update_weights_from_tensor(policies[1].tensors)
    assert cluster.weight_version == 1


def test_a_group_knows_who_was_there_when_it_was_made(make_cluster, policies):
    cluster, pool = make_cluster(2)
    call = arguments(policies[0].tensors)
    with group_of(cluster, 3):
        kill(cluster, pool, "replica-1")
        with pytest.raises(WeightUpdateError, match="not all replicas are there after 0 s"):
            cluster.init_weights_update_group("127.0.0.1", 1, 1, 3, "another", timeout=0.0)
        rejoined(cluster)
        with pytest.raises(WeightUpdateError, match="replica-1 came after the group"):
            cluster.update_weights_from_distributed(**call)
    with pytest.raises(InvalidInputError, match="no group of this cluster"):
        cluster.update_weights_from_distributed(**call)


def test_options_and_calls_out_of_turn_are_refused(make_cluster, policies, monkeypatch):
    cluster, _ = make_cluster(1)
    tensors = policies[0].tensors
    with pytest.raises(InvalidInputError, match="weight_version=0"):
        cluster.begin_weight_update(weight_version=0)
    with pytest.raises(InvalidInputError, match="lora_scaling"):
        cluster.begin_weight_update(lora_scaling=1.0)
    cluster.begin_weight_update()
    with pytest.raises(WeightUpdateError, match="under way"):
        cluster.begin_weight_update()
    with pytest.raises(InvalidInputError, match="set by begin_weight_update"):
        cluster.update_weights_from_tensor(tensors, partial=True)
    cluster.abandon_weight_update()
    monkeypatch.setattr(weights, "CACHED_BUCKET_BYTES", 8192)  # of which many are sent
    last = max(tensors)
    packed = list(buckets((tensors | {last: tensors[last] * float("nan")}).items(), 1 << 30))
    with pytest.raises(InvalidInputError, match="NaN"):
        cluster.update_weights_from_tensor(
            packed, load_format="flattened_bucket", check_finite=True
        )
    assert cluster.can_run


def test_sleep_and_wake_reach_all_and_those_who_come_meanwhile(make_cluster, policies):
    cluster, pool = make_cluster(2)
    cluster.update_weights_from_tensor(policies[0].tensors)
    assert cluster.release_memory()["weights"] > 0
    assert cluster.released_tags == {"weights", "kv_cache"}
    assert "released" in cluster.unavailable_reason
    kill(cluster, pool, "replica-0")
    look_around(cluster)
    assert list(cluster.replicas.joined) == ["replica-1"]
    with pytest.raises(EngineStateError):
        cluster.release_memory(["weights"])
    cluster.resume_memory()
    assert cluster.released_tags == frozenset()
    rejoined(cluster)
    reasons = [
        each.unavailable_reason for each in cluster.replicas.on_all(RolloutEngine.status).values()
    ]
    assert reasons == ["", ""]
    assert cluster.weights_digest() == policies[0].digest
    assert generated(cluster, PROMPTS, PARAMS) == policies[0].rollouts


def test_requests_in_flight_go_on_with_the_new_weights(make_cluster, policies):
    cluster, pool = make_cluster(2)
    long = SamplingParams(temperature=0.9, max_new_tokens=450, ignore_eos=True)
    with pool.held():
        requests = [cluster.submit(prompt, long) for prompt in PROMPTS]
        for request in requests:
            cluster.watch(request.request_id)  # their tokens come at once
        wait_until(lambda: any(request.token_ids for request in requests), cluster.step)
        cluster.update_weights_from_tensor(policies[0].tensors)
    rollouts = []
    while cluster.has_unfinished:
        rollouts += cluster.step()
    assert all(each.weight_versions == sorted(each.weight_versions) for each in rollouts)
    assert any(set(each.weight_versions) == {0, 1} for each in rollouts)  # it was found running
    with pool.held():
        for prompt in PROMPTS:
            cluster.submit(prompt, long)
        cluster.update_weights_from_tensor(policies[1].tensors, abort_all_requests=True)
    rollouts = cluster.take_ended()
    assert [each.finish_reason.value for each in rollouts] == ["abort"] * 4
    assert not cluster.has_unfinished


def test_weights_that_died_with_the_last_replica_are_missed_until_a_full_update(
    make_cluster, policies
):
    cluster, pool = make_cluster(2)
    cluster.update_weights_from_tensor(policies[0].tensors)
    for replica in list(pool.living.values()):
        replica.kill()
    cluster.submit(PROMPTS[0], PARAMS)
    poll_until(cluster, lambda: cluster.weights.sync.why_lost and cluster.replicas.all_joined)
    assert "every replica that had the updated weights died" in cluster.unavailable_reason
    for call in (cluster.step, lambda: cluster.score_with_extras(PROMPTS[0], [5, 6])):
        with pytest.raises(WeightUpdateError, match="every tensor of the target"):
            call()
    cluster.update_weights_from_tensor(policies[1].tensors)
    assert cluster.weights_digest() == policies[1].digest
    statuses = cluster.replicas.on_all(RolloutEngine.status).values()
    # No policy shares its number with the one that was lost.
    assert [each.weight_versions for each in statuses] == [{"target": 2}] * 2
    assert len(drain(cluster)) == 1


def test_replicas_that_come_during_an_update_wait_for_its_end(make_cluster, policies):
    cluster, pool = make_cluster(2)
    first, others = halves(policies[1].tensors)
    kill(cluster, pool, "replica-1")
    cluster.begin_weight_update()
    cluster.update_weights_from_tensor(first)
    look_around(cluster)
    assert list(cluster.replicas.joined) == ["replica-0"]
    cluster.update_weights_from_tensor(others)
    cluster.end_weight_update()
    rejoined(cluster)
    assert cluster.weights_digest() == policies[1].digest
