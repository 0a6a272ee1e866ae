"""After any fault of an update the old weights serve, or the engine refuses and says why.

Proved by hashing every tensor, by every transport; and a full update heals what is torn.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from rollout.errors import (
    CheckpointError,
    EngineStateError,
    InvalidInputError,
    RolloutError,
    WeightUpdateError,
)
from rollout.weights.bucket import buckets
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.weight_transports import TRANSPORTS, opened
from tests.weights.conftest import PARAMS, PROMPTS, assert_serves, outputs

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def unknown_name(tensors):
    tensors["model.layers.7.self_attn.q_proj.weight"] = tensors[Q_PROJ].clone()
    return "model.layers.7.self_attn.q_proj.weight"


def missing_name(tensors):
    del tensors[Q_PROJ]
    return f"missing: {Q_PROJ}"


def wrong_shape(tensors):
    tensors[Q_PROJ] = tensors[Q_PROJ][:-1].clone()
    return "47"


def wrong_dtype(tensors):
    tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int32)
    return "int32|I32"


def not_a_number(tensors):
    tensors[Q_PROJ] = tensors[Q_PROJ].clone()
    tensors[Q_PROJ][3, 5] = float("nan")
    return "NaN"


FAULTS = {
    "unknown name": unknown_name,
    "missing name": missing_name,
    "wrong shape": wrong_shape,
    "wrong dtype": wrong_dtype,
    "NaN": not_a_number,
}
# What is known beforehand is refused beforehand: these never write a byte of a bad update.
CHECKED_BEFORE = ("collection", "disk", "shared_memory_calls", "distributed", "distributed_bare")


def assert_old_or_refuses(engine, old, before):
    """Never a mix: what serves is bitwise the old policy, and what is not whole serves nothing."""
    assert engine.weight_version == before
    if engine.can_run:
        assert engine.weights_digest() == old.digest
        assert outputs(engine) == old.outputs
        return
    assert "torn" in engine.unavailable_reason
    for call in (lambda: engine.generate(PROMPTS, PARAMS), lambda: engine.score([1], [2])):
        with pytest.raises((WeightUpdateError, EngineStateError), match="torn"):
            call()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_whole_update_is_the_new_policy(engine, policies, tmp_path, kind):
    with opened(kind, engine, tmp_path / "new") as update:
        for version, policy in enumerate((policies[1], policies[2]), 1):
            update(policy.tensors)
            assert engine.weight_version == version
            assert_serves(engine, policy)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_bad_update(engine, policies, tmp_path, kind, fault):
    old, new, other = policies
    bad = dict(new.tensors)
    message = FAULTS[fault](bad)
    with opened(kind, engine, tmp_path / "new") as update:
        with pytest.raises(RolloutError, match=message):
            update(bad, check_finite=True)
        assert_old_or_refuses(engine, old, before=0)
        if kind in CHECKED_BEFORE and (fault != "NaN" or kind in ("collection", "disk")):
            assert engine.can_run, "this was known before a byte moved"
        update(other.tensors)
    assert_serves(engine, other)


@pytest.mark.parametrize("kind", ["handles", "buckets"])
def test_values_that_are_all_there_are_looked_at_before_the_first_is_written(
    engine, policies, kind
):
    old, new, _ = policies
    infinite, too_large = dict(new.tensors), dict(new.tensors)
    name = max(infinite)
    infinite[name] = torch.full_like(infinite[name], float("inf"))
    too_large[name] = torch.full_like(too_large[name], 1e300, dtype=torch.float64)
    with SharedMemorySender(1 << 20, num_segments=4) as sender:

        def update(tensors, **options):
            if kind == "handles":
                engine.update_weights_from_ipc(list(sender.handles(tensors.items())), **options)
            else:
                packed = list(buckets(tensors.items(), 1 << 20))
                engine.update_weights_from_tensor(packed, load_format="flattened_bucket", **options)

        for bad in (infinite, too_large):
            with pytest.raises(InvalidInputError, match=r"infinite in torch\.float32"):
                update(bad, check_finite=True)
            assert engine.can_run
            assert engine.weights_digest() == old.digest
        update(new.tensors, check_finite=True)
    assert_serves(engine, new)


def save_sharded(tensors, folder):
    """Save a checkpoint of several files; returns the files in order."""
    names = sorted(tensors)
    files = [f"model-{shard:05}-of-00003.safetensors" for shard in (1, 2, 3)]
    for shard, file in enumerate(files):
        save_file({name: tensors[name] for name in names[shard::3]}, folder / file)
    weight_map = {name: files[index % 3] for index, name in enumerate(names)}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return [folder / file for file in files]


@pytest.mark.parametrize("left", ["all but a byte", "half", "the header", "nothing"])
def test_a_truncated_shard_is_refused_before_a_byte_moves(engine, policies, tmp_path, left):
    """The first shard is whole, so whoever reads one after the other would have loaded it."""
    old, new, _ = policies
    _, second, _ = save_sharded(new.tensors, tmp_path)
    whole = second.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    lengths = {"all but a byte": -1, "half": len(whole) // 2, "the header": header, "nothing": 0}
    second.write_bytes(whole[: lengths[left]])
    with pytest.raises(CheckpointError, match=second.name):
        engine.update_weights_from_disk(tmp_path)
    assert engine.weight_version == 0
    assert_serves(engine, old)
    second.write_bytes(whole)
    engine.update_weights_from_disk(tmp_path)
    assert_serves(engine, new)


@pytest.mark.parametrize("flush_cache", [True, False])
def test_an_update_keeps_the_corpus_and_drops_the_prefix_cache(engine, policies, flush_cache):
    """Text may be drafted from whoever wrote it; KV is of the weights that computed it."""
    _, new, _ = policies
    prompt = list(range(5, 40))
    engine.generate([prompt], PARAMS)
    (again,) = engine.generate([prompt], PARAMS)
    assert again.stats.cached_tokens > 0
    corpus_tokens = engine.worker.counters()["corpus/live_tokens"]
    assert corpus_tokens > 0
    # More tokens than one step can draft, so that it runs whatever the corpus proposes.
    running = engine.submit(PROMPTS[0], replace(PARAMS, max_new_tokens=100))
    engine.step()
    engine.update_weights_from_tensor(new.tensors.items(), flush_cache=flush_cache)
    assert engine.worker.counters()["corpus/live_tokens"] >= corpus_tokens
    assert engine.worker.memory.usage.cached == 0
    assert engine.scheduler.num_running == (0 if flush_cache else 1), "retracted, unless told"
    engine.abort(running.request_id)
    engine.step()
    (after,) = engine.generate([prompt], PARAMS)
    assert after.stats.cached_tokens == 0
    assert set(after.weight_versions) == {1}
    assert engine.worker.counters()["corpus/live_tokens"] > corpus_tokens


def test_nan_is_taken_unless_it_is_to_be_refused(engine, policies):
    bad = dict(policies[1].tensors)
    not_a_number(bad)
    engine.update_weights_from_tensor(bad.items())
    assert engine.weight_version == 1
    assert engine.weights_digest() not in {policy.digest for policy in policies}


def test_a_second_transaction_during_the_first(engine, policies):
    new = policies[1]
    pairs = list(new.tensors.items())
    engine.begin_weight_update()
    engine.update_weights_from_tensor(pairs[:5])
    with pytest.raises(WeightUpdateError, match="under way"):
        engine.begin_weight_update()
    engine.update_weights_from_tensor(pairs[5:])
    engine.end_weight_update()
    assert_serves(engine, new)
    assert engine.weight_version == 1


def test_an_update_that_is_left_open_cannot_be_seen_through(engine, policies):
    old, new, other = policies
    engine.begin_weight_update()
    assert_old_or_refuses(engine, old, before=0)
    engine.update_weights_from_tensor(list(new.tensors.items())[:5])
    assert not engine.can_run
    with pytest.raises(InvalidInputError, match="missing"):
        engine.end_weight_update()
    assert_old_or_refuses(engine, old, before=0)
    engine.update_weights_from_disk(other.folder)
    assert_serves(engine, other)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_requests_run_while_updates_come(engine, policies, tmp_path, kind):
    """A good one, a bad one, a good one: no request is lost, each token carries its version."""
    _, new, other = policies
    bad = dict(other.tensors)
    wrong_shape(bad)
    params = replace(PARAMS, max_new_tokens=60)  # more than three steps emit, however they draft
    requests = [engine.submit(prompt, params) for prompt in PROMPTS]
    ended = {}
    with opened(kind, engine, tmp_path / "new") as update:
        for tensors in (new.tensors, bad, other.tensors):
            if engine.can_run:
                ended |= {rollout.request_id: rollout for rollout in engine.step()}
            else:
                with pytest.raises(WeightUpdateError, match="torn"):
                    engine.step()
            try:
                update(tensors)
            except RolloutError:
                assert tensors is bad
    assert not ended, "they must still be running"
    while engine.has_unfinished:
        ended |= {rollout.request_id: rollout for rollout in engine.step()}
    assert set(ended) == {request.request_id for request in requests}
    last = engine.weight_version
    for rollout in ended.values():
        assert len(rollout.token_ids) == params.max_new_tokens
        assert rollout.weight_versions == sorted(rollout.weight_versions)
        assert set(rollout.weight_versions) <= {0, 1, last}
        assert rollout.weight_versions[-1] == last
    assert_serves(engine, other)
