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


def drafted(policies, draft_path, spec="eagle", **spec_options) -> RolloutEngine:
    options = {"draft_path": str(draft_path), "budget": "fixed", "min_probability": 0.0}
    return RolloutEngine.from_pretrained(
        policies[0].folder, spec, max_running=4, chunk_len=16, spec_options=options | spec_options
    )


def tensors_of(engine):
    """The tensors of an engine's draft, by the names that an update uses."""
    weight_loaders = engine.worker.weights.parts["draft"].weight_loaders()
    return {name: each.read() for name, each in weight_loaders.items() if each.required}


def finish(engine):
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    return [(rollout.token_ids, rollout.logprobs) for rollout in ended]


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
    assert finish(engine) == expected
    assert engine.weight_versions == {"target": 0, "draft": 1}
    assert engine.worker.counters()["draft/trees"] > grown, "it drafts again, with the new weights"


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_draft_from_a_folder_of_any_layout(policies, tmp_path, layout):
    """Its names are mapped, and the rows of its head, as when it is loaded."""
    shape = {"draft_vocab_size": 40, "unsorted": True}
    folders = [
        save_tiny_eagle3(tmp_path / name, policies[0].folder, **shape, **options)
        for name, options in (
            ("old", {}),
            ("new", {"layout": layout}),
            ("other vocabulary", {"seed": 4}),
            ("other shape", {"intermediate_size": 64}),
            ("other shape yet", {"options": {"norm_before_residual": True}}),
        )
    ]
    _, new, *others = folders
    engine = drafted(policies, folders[0])
    engine.update_weights_from_tensor(
        {name: torch.zeros_like(values) for name, values in tensors_of(engine).items()},
        selector="draft",
    )
    zeroed = engine.weights_digest()
    for folder in others:
        with pytest.raises(CheckpointError, match=f"another {folder.name.split()[1]}"):
            engine.update_weights_from_disk(folder, selector="draft")
    assert engine.weights_digest() == zeroed
    engine.update_weights_from_disk(new, selector="draft")
    assert engine.weights_digest() == drafted(policies, new).weights_digest()
    assert engine.can_run


@pytest.mark.parametrize(("layout", "num_steps"), [("separate", 3), ("qwen3_next", 2)])
def test_the_first_steps_of_a_chain_from_a_folder(tmp_path, layout, num_steps):
    """Later steps of a longer chain are neither held nor asked for."""
    target, chain = save_tiny_mtp(tmp_path, layout, num_steps)
    options = {"draft_path": str(chain), "num_steps": 2, "calibration_seconds": 0}
    engine = RolloutEngine.from_pretrained(target, "mtp", spec_options=options)
    parts = engine.worker.weights.parts
    assert list(parts) == ["target", "draft_step_0", "draft_step_1"]
    digest = engine.weights_digest()
    zeros = {name: torch.zeros(spec.shape) for name, spec in parts.manifest("draft").items()}
    engine.update_weights_from_tensor(zeros, selector="draft")
    assert engine.weights_digest() != digest
    engine.update_weights_from_disk(chain, selector="draft")
    assert engine.weights_digest() == digest


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
        assert results(engine) == results(new)
    trees = engine.worker.counters()["draft/trees"]
    engine.update_weights_from_disk(folders[1], selector="draft")
    assert digests(engine) == wanted
    assert engine.weight_versions == {"target": 2, "draft_step_0": 1, "draft_step_1": 1}
    assert results(engine) == results(new)
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


@pytest.mark.parametrize("layout", ["mimo", "qwen3_next", "deepseek_v3"])
def test_an_engine_without_drafts_ignores_a_chain_whichever_way_it_comes(tmp_path, layout):
    folders = [save_tiny_mtp(tmp_path / str(seed), layout, seed=seed)[0] for seed in range(2)]
    engine = RolloutEngine.from_pretrained(folders[0], spec="none")
    policies = [load_file(folder / "model.safetensors") for folder in folders]
    expected = [results(RolloutEngine.from_pretrained(each, spec="none")) for each in folders]
    assert expected[0] != expected[1]
    for version, how in enumerate(("disk", "collection", "generator", "announced"), 1):
        named = policies[version % 2]
        if how == "disk":
            engine.update_weights_from_disk(folders[version % 2])
        elif how == "announced":
            engine.begin_weight_update({name: TensorSpec.of(it) for name, it in named.items()})
            engine.update_weights_from_tensor(named)
            engine.end_weight_update()
        else:
            pairs = named.items()
            engine.update_weights_from_tensor(pairs if how == "collection" else iter(pairs))
        assert results(engine) == expected[version % 2], how
        assert engine.weight_version == version

    with pytest.raises(InvalidInputError, match=r"unexpected: model.layers.1.enorm.weight"):
        engine.update_weights_from_tensor(
            policies[0] | {"model.layers.1.enorm.weight": torch.ones(4)}
        )
    plain = engine.worker.target.model.weight_loaders()
    only_chain = {name: it for name, it in policies[0].items() if name not in plain}
    with pytest.raises(InvalidInputError, match="must bring a tensor"):
        engine.update_weights_from_tensor(iter(only_chain.items()), partial=True)
    assert engine.worker.weights.serves
