"""Engines with a neural draft, and chains that come with a target: what updates reach or ignore."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.errors import CheckpointError, InvalidInputError, WeightUpdateError
from rollout.weights.manifest import TensorSpec
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_mtp import LAYERS, chain_tensors, save_tiny_mtp

PROMPT = list(range(3, 40))
PARAMS = SamplingParams(max_new_tokens=40, seed=3, ignore_eos=True)


LAYOUT = "qwen3_next"  # the first step of its chains has tensors that all steps share


def results(engine):
    return [(each.token_ids, each.logprobs) for each in engine.generate([PROMPT], PARAMS)]


@pytest.fixture(scope="module")
def draft_paths(tmp_path_factory, policies):
    """Two drafts of the same target."""
    folders = [tmp_path_factory.mktemp(f"draft-{seed}") for seed in range(2)]
    return [
        save_tiny_eagle3(folder, policies[0].folder, seed=seed)
        for seed, folder in enumerate(folders)
    ]


def drafted(policies, draft_path) -> RolloutEngine:
    options = {"draft_path": str(draft_path), "budget": "fixed", "min_probability": 0.0}
    return RolloutEngine.from_pretrained(
        policies[0].folder, "eagle", max_running=4, chunk_len=16, spec_options=options
    )


def tensors_of(engine):
    """The tensors of an engine's draft, by the names that an update uses."""
    weight_loaders = engine.worker.weights.parts["draft"].weight_loaders()
    return {name: each.read() for name, each in weight_loaders.items() if each.required}


def test_new_drafts_in_the_middle_of_a_rollout(policies, draft_paths):
    """One that streams in and breaks off serves nothing until a whole one comes."""
    engine = drafted(policies, draft_paths[0])
    expected = results(engine)
    new = tensors_of(drafted(policies, draft_paths[1]))
    request = engine.submit(PROMPT, PARAMS)
    for _ in range(5):
        assert not engine.step()
    computed = request.computed_len
    some = dict(list(new.items())[:-1])
    with pytest.raises(InvalidInputError, match="missing: draft"):
        engine.update_weights_from_tensor(iter(some.items()), selector="draft")
    with pytest.raises(WeightUpdateError, match=r"every tensor of draft$"):
        engine.step()
    assert engine.weights_digest("target") == policies[0].digest
    grown = engine.worker.counters()["draft/trees"]
    engine.update_weights_from_tensor(new.items(), selector="draft")
    assert request.computed_len == computed, "the target's KV stays"
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    assert [(each.token_ids, each.logprobs) for each in ended] == expected
    assert engine.weight_versions == {"target": 0, "draft": 1}
    assert engine.worker.counters()["draft/trees"] > grown, "it drafts again, with the new weights"


def test_a_draft_from_a_folder_of_another_layout(policies, tmp_path):
    """Its names are mapped, and the rows of its head, as when it is loaded."""
    shape = {"draft_vocab_size": 40, "unsorted": True}
    old, new, other = (
        save_tiny_eagle3(tmp_path / name, policies[0].folder, **shape, **options)
        for name, options in (
            ("old", {}),
            ("new", {"layout": "speculators"}),
            ("other", {"intermediate_size": 64}),
        )
    )
    engine = drafted(policies, old)
    zeros = {name: torch.zeros_like(values) for name, values in tensors_of(engine).items()}
    engine.update_weights_from_tensor(zeros, selector="draft")
    zeroed = engine.weights_digest()
    with pytest.raises(CheckpointError, match="another shape"):
        engine.update_weights_from_disk(other, selector="draft")
    assert engine.weights_digest() == zeroed
    engine.update_weights_from_disk(new, selector="draft")
    assert engine.weights_digest() == drafted(policies, new).weights_digest()


@pytest.fixture
def folders(tmp_path):
    """Two targets, each with a chain beside it; the chains differ too."""
    return [
        save_tiny_mtp(
            tmp_path / str(seed), LAYOUT, 2, seed=seed, extra=chain_tensors(LAYOUT, 2, seed=seed)
        )
        for seed in range(2)
    ]


def make_engine(folder, **spec_options):
    options = {"budget": "fixed", "min_probability": 0.0, "topk": 2}
    return RolloutEngine.from_pretrained(
        folder, "mtp", max_running=4, spec_options=options | spec_options, kv_bytes=1 << 20
    )


def digests(engine):
    return {part: engine.weights_digest(part) for part in engine.weight_versions}


def test_a_frozen_chain_is_left_alone_by_the_targets_own_folder(folders):
    engine, new = make_engine(folders[0]), make_engine(folders[1])
    before, wanted = digests(engine), digests(new)
    assert list(before) == ["target", "draft_step_0", "draft_step_1"]
    for keep_weights in (True, False):
        engine.release_memory(keep_weights=keep_weights)
        engine.resume_memory(["weights"])
        counts = engine.update_weights_from_disk(folders[1])
        engine.resume_memory(["kv_cache"])
        assert digests(engine) == before | {"target": wanted["target"]}
        assert results(engine) == results(new)
    left = engine.worker.counters()
    assert left["weights/stored/target"] == 2 * counts.stored["target"]
    assert left["weights/ignored/draft_step_1"] == 2 * counts.ignored["draft_step_1"] > 0
    engine.update_weights_from_disk(folders[1], selector="draft")
    assert digests(engine) == wanted
    assert engine.weight_versions == {"target": 2, "draft_step_0": 1, "draft_step_1": 1}


def test_a_chain_that_is_not_frozen_comes_with_the_target(folders):
    engine, new = make_engine(folders[0], frozen=False), make_engine(folders[1])
    named = load_file(folders[1] / "model.safetensors")
    last = next(
        name for name in named if "mtp" in name and name.endswith("1.self_attn.q_proj.weight")
    )
    with pytest.raises(InvalidInputError, match=f"missing: {last}".replace(".", r"\.")):
        engine.update_weights_from_tensor({n: it for n, it in named.items() if n != last})
    engine.update_weights_from_tensor(iter(named.items()))
    assert digests(engine) == digests(new)
    assert results(engine) == results(new)


def test_every_steps_pool_is_counted_and_given_back(folders):
    plain = RolloutEngine.from_pretrained(folders[0], "none", kv_bytes=1 << 20)
    engine = make_engine(folders[0], num_steps=3)
    runners = engine.worker.drafter.runners
    pools = [engine.worker.target.kv_pool, *(runner.kv.pool for runner in runners)]
    # Slot 0 of a pool is nobody's.
    used = sum(it[1:].nbytes for pool in pools for it in pool.keys + pool.values)
    per_slot = (LAYERS + 3) * plain.worker.target.kv_pool.keys[0][0].nbytes * 2
    assert (1 << 20) - per_slot < used <= 1 << 20
    tensors = [it for runner in runners for it in runner.kv.pool.keys + runner.kv.pool.values]
    assert len({it.data_ptr() for it in tensors}) == 6
    before = results(engine)
    engine.release_memory()
    assert not any(it.untyped_storage().nbytes() for it in tensors)
    engine.resume_memory()
    assert results(engine) == before


def test_a_draft_that_an_update_has_spoiled_is_noticed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rollout.engine.accept_lengths._ROWS", 20)
    engine = make_engine(save_tiny_mtp(tmp_path, "mimo", likely=True), frozen=False)
    results(engine)
    read = engine.worker.weights.parts.read(engine.weights_manifest())
    spoiled = {name: -9 * it if name.endswith("input_proj.weight") else it for name, it in read}
    engine.update_weights_from_tensor(spoiled)
    results(engine)
    (warning,) = caplog.records
    assert "since weight version 1 the accept length of drafts is" in warning.getMessage()


@pytest.mark.parametrize("layout", ["mimo", "deepseek_v3"])
def test_an_engine_without_drafts_ignores_a_chain(tmp_path, layout):
    folders = [save_tiny_mtp(tmp_path / str(seed), layout, seed=seed) for seed in range(2)]
    engine = RolloutEngine.from_pretrained(folders[0], spec="none")
    old, new = (load_file(folder / "model.safetensors") for folder in folders)
    expected = [results(RolloutEngine.from_pretrained(each, spec="none")) for each in folders]
    assert expected[0] != expected[1]
    engine.update_weights_from_disk(folders[1])
    assert results(engine) == expected[1]
    engine.update_weights_from_tensor(iter(old.items()))
    assert results(engine) == expected[0]
    engine.begin_weight_update({name: TensorSpec.of(it) for name, it in new.items()})
    engine.update_weights_from_tensor(new)
    engine.end_weight_update()
    assert results(engine) == expected[1]

    with pytest.raises(InvalidInputError, match=r"unexpected: model.layers.1.enorm.weight"):
        engine.update_weights_from_tensor(old | {"model.layers.1.enorm.weight": torch.ones(4)})
    plain = engine.worker.target.model.weight_loaders()
    only_chain = {name: it for name, it in old.items() if name not in plain}
    with pytest.raises(InvalidInputError, match="must bring a tensor"):
        engine.update_weights_from_tensor(iter(only_chain.items()), partial=True)
