"""An engine with an MTP chain: what updates reach, and what sleep gives back."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError
from tests.helpers.tiny_mtp import KV_HEADS, LAYERS, D, chain_tensors, save_tiny_mtp

PROMPT = list(range(3, 30))
PARAMS = SamplingParams(max_new_tokens=16, seed=3, n=2, ignore_eos=True)


@pytest.fixture(params=["mimo", "qwen3_next"])
def folders(request, tmp_path):
    """Two targets, each with a chain beside it; the chains differ too."""
    layout = request.param
    return [
        save_tiny_mtp(
            tmp_path / str(seed), layout, 2, seed=seed, extra=chain_tensors(layout, 2, seed=seed)
        )[0]
        for seed in range(2)
    ]


def make_engine(folder, **spec_options):
    options = {"budget": "fixed", "min_probability": 0.0, "topk": 2}
    return RolloutEngine.from_pretrained(
        folder, "mtp", max_running=4, spec_options=options | spec_options, kv_bytes=1 << 20
    )


def outputs(engine):
    return [(r.token_ids, r.logprobs) for r in engine.generate([PROMPT], PARAMS)]


def digests(engine):
    return {part: engine.weights_digest(part) for part in engine.weight_versions}


def test_a_frozen_chain_is_left_alone_by_the_targets_own_folder(folders):
    engine, new = make_engine(folders[0]), make_engine(folders[1])
    before, wanted = digests(engine), digests(new)
    assert list(before) == ["target", "draft_step_0", "draft_step_1"]
    for keep_weights in (True, False):
        engine.release_memory(keep_weights=keep_weights)
        engine.resume_memory(["weights"])
        engine.update_weights_from_disk(folders[1])
        engine.resume_memory(["kv_cache"])
        assert digests(engine) == before | {"target": wanted["target"]}
        assert outputs(engine) == outputs(new)
    trees = engine.worker.counters()["draft/trees"]
    engine.update_weights_from_disk(folders[1], selector="draft")
    assert digests(engine) == wanted
    assert engine.weight_versions == {"target": 2, "draft_step_0": 1, "draft_step_1": 1}
    assert outputs(engine) == outputs(new)
    assert engine.worker.counters()["draft/trees"] > trees


def test_one_step_is_updated_from_a_whole_chains_folder(folders):
    """Only that step's own tensors are read of the chain; shared ones are the first step's."""
    engine, new = make_engine(folders[0]), make_engine(folders[1])
    before, wanted = digests(engine), digests(new)
    engine.update_weights_from_disk(folders[1], selector="draft_step_1")
    found = digests(engine)
    assert found == before | {"draft_step_1": found["draft_step_1"]}
    assert found["draft_step_1"] != before["draft_step_1"]
    engine.update_weights_from_disk(folders[1], selector="draft_step_0")
    assert digests(engine) == wanted | {"target": before["target"]}
    assert engine.weight_versions == {"target": 0, "draft_step_0": 1, "draft_step_1": 1}


def test_a_chain_that_is_not_frozen_comes_with_the_target(folders):
    engine, new = make_engine(folders[0], frozen=False), make_engine(folders[1])
    named = load_file(folders[1] / "model.safetensors")
    last = next(name for name in named if name.endswith("layers.1.self_attn.q_proj.weight")
                and "mtp" in name)  # fmt: skip
    with pytest.raises(InvalidInputError, match=f"missing: {last}".replace(".", r"\.")):
        engine.update_weights_from_tensor({n: it for n, it in named.items() if n != last})
    engine.update_weights_from_tensor(iter(named.items()))
    assert digests(engine) == digests(new)
    assert outputs(engine) == outputs(new)


def test_every_steps_pool_is_counted_and_given_back(folders):
    plain = RolloutEngine.from_pretrained(folders[0], "none", kv_bytes=1 << 20)
    engine = make_engine(folders[0], num_steps=3)
    runners = engine.worker.drafter.runners
    assert [runner.kv.horizon for runner in runners] == [1, 2, 3]
    assert runners[2].model is runners[1].model
    pools = [engine.worker.target.kv_pool, *(runner.kv.pool for runner in runners)]
    # Slot 0 of a pool is nobody's.
    used = sum(it[1:].nbytes for pool in pools for it in pool.keys + pool.values)
    per_slot = (LAYERS + 3) * plain.worker.target.kv_pool.keys[0][0].nbytes * 2
    assert (1 << 20) - per_slot < used <= 1 << 20
    assert runners[0].kv.pool.keys[0].shape[1:] == (KV_HEADS, D)
    tensors = [it for runner in runners for it in runner.kv.pool.keys + runner.kv.pool.values]
    assert len({it.data_ptr() for it in tensors}) == 6
    before = outputs(engine)
    engine.release_memory()
    assert not any(it.untyped_storage().nbytes() for it in tensors)
    engine.resume_memory()
    assert outputs(engine) == before
    engine.check_integrity()
