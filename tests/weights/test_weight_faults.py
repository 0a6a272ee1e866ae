"""After any fault of an update the old weights serve, or the engine refuses and says why.

Each transport is given each fault, and a full update heals what is torn.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from rollout import RolloutEngine
from rollout.config import LoadFormat, ModelConfig
from rollout.errors import (
    CheckpointError,
    EngineStateError,
    InvalidInputError,
    RolloutError,
    WeightUpdateError,
)
from rollout.offline.config import DataConfig, RunConfig
from rollout.weights.bucket import buckets
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.weight_transports import TRANSPORTS, opened
from tests.weights.conftest import PARAMS, PROMPTS, assert_serves, outputs

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


NAN = torch.tensor(float("nan"))
FAULTS = {  # by what is said of it: what comes in place of the tensor
    "unexpected: odd": lambda w: {Q_PROJ: w, "odd": w.clone()},
    f"missing: {Q_PROJ}": lambda w: {},
    "47": lambda w: {Q_PROJ: w[:-1].clone()},
    "int32|I32": lambda w: {Q_PROJ: w.to(torch.int32)},
    "NaN": lambda w: {Q_PROJ: w.index_fill(0, torch.tensor(3), NAN)},
}


def faulty(policy, fault):
    changed = FAULTS[fault](policy.tensors[Q_PROJ])
    return {name: it for name, it in policy.tensors.items() if name != Q_PROJ} | changed


# What is known beforehand is refused beforehand: these never write a byte of a bad update.
CHECKED_BEFORE = ("collection", "disk", "shared_memory_calls", "distributed")


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
def test_a_bad_update_leaves_the_old_weights_or_serves_nothing(engine, policies, tmp_path, kind):
    with opened(kind, engine, tmp_path / "new") as update:
        for count, fault in enumerate(FAULTS):
            old, new, other = (policies[(count + index) % 3] for index in range(3))
            with pytest.raises(RolloutError, match=fault):
                update(faulty(other, fault), check_finite=True)
            assert_old_or_refuses(engine, old, before=count)
            if kind in CHECKED_BEFORE and (fault != "NaN" or kind in ("collection", "disk")):
                assert engine.can_run, f"{fault} was known before a byte moved"
            update(new.tensors)
            assert engine.weight_version == count + 1
            assert_serves(engine, new)


def test_values_that_are_all_there_are_checked_before_the_first_is_written(engine, policies):
    old, new, _ = policies
    name = max(new.tensors)
    infinite = torch.full_like(new.tensors[name], float("inf"))
    too_large = torch.full_like(infinite, 1e300, dtype=torch.float64)
    with SharedMemorySender(1 << 20, num_segments=4) as sender:
        for bad in (infinite, too_large):
            tensors = new.tensors | {name: bad}
            packed = list(buckets(tensors.items(), 1 << 20))
            for update in (
                partial(engine.update_weights_from_ipc, list(sender.handles(tensors.items()))),
                partial(engine.update_weights_from_tensor, packed, load_format="flattened_bucket"),
            ):
                with pytest.raises(InvalidInputError, match=r"infinite in torch\.float32"):
                    update(check_finite=True)
                assert engine.can_run
                assert engine.weights_digest() == old.digest


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


def test_a_truncated_shard_is_refused_before_a_byte_moves(engine, policies, tmp_path):
    """The first shard is whole, so whoever reads one after the other would have loaded it."""
    old, new, _ = policies
    _, second, _ = save_sharded(new.tensors, tmp_path)
    whole = second.read_bytes()
    for length in (len(whole) - 1, 8 + int.from_bytes(whole[:8], "little"), 0):
        second.write_bytes(whole[:length])
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
    engine.update_weights_from_tensor(faulty(policies[1], "NaN"))
    assert engine.weight_version == 1
    assert engine.weights_digest() not in {policy.digest for policy in policies}


def test_an_update_that_is_left_open_cannot_be_seen_through(engine, policies):
    old, new, other = policies
    engine.begin_weight_update()
    assert_old_or_refuses(engine, old, before=0)
    engine.update_weights_from_tensor(list(new.tensors.items())[:5])
    assert not engine.can_run
    with pytest.raises(WeightUpdateError, match="under way"):
        engine.begin_weight_update()
    with pytest.raises(InvalidInputError, match="missing"):
        engine.end_weight_update()
    assert_old_or_refuses(engine, old, before=0)
    engine.update_weights_from_disk(other.folder)
    assert_serves(engine, other)


def test_an_engine_without_a_weight_file_serves_what_a_full_update_brings(policies, tmp_path):
    bare, (policy, *_) = tmp_path / "bare", policies
    shutil.copytree(policy.folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    engine = RolloutEngine.from_pretrained(bare, "ngram", load_format="dummy")
    tensors = list(policy.tensors.items())
    with pytest.raises(WeightUpdateError, match="load_format=dummy"):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(WeightUpdateError, match="cannot heal"):
        engine.update_weights_from_tensor(tensors[:1], partial=True)
    engine.update_weights_from_tensor(tensors)
    assert_serves(engine, policy)
    model = ModelConfig(path="model", load_format=LoadFormat.dummy)
    with pytest.raises(InvalidInputError, match=r"model\.load_format"):
        RunConfig(model=model, data=DataConfig(path="prompts.jsonl"))
