"""An engine with an EAGLE draft: whose weights an update reaches, and what sleep gives back."""

from __future__ import annotations

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.errors import CheckpointError, InvalidInputError, WeightUpdateError
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_mtp import save_tiny_mtp
from tests.weights.conftest import outputs

PROMPT = list(range(3, 40))
PARAMS = SamplingParams(max_new_tokens=40, seed=3, ignore_eos=True)


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


@pytest.mark.parametrize("spec", ["eagle", "hybrid"])
def test_trainers_of_the_target_never_touch_a_frozen_draft(policies, draft_paths, spec):
    """Streams of the target alone between sleeps at both levels, as RL trainers do."""
    engine = drafted(policies, draft_paths[0], spec)
    draft = engine.weights_digest("draft")
    for round_, policy in enumerate([*policies[1:], policies[0]]):
        freed = engine.release_memory(keep_weights=bool(round_ % 2))
        assert freed["weights"] > sum(tensor.nbytes for tensor in policy.tensors.values())
        engine.resume_memory(["weights"])
        assert engine.weights_digest("draft") == draft
        engine.update_weights_from_tensor(policy.tensors.items())
        engine.resume_memory(["kv_cache"])
        assert engine.weights_digest("target") == policy.digest
        assert engine.weights_digest("draft") == draft
        assert outputs(engine) == policy.outputs
    assert engine.weight_versions == {"target": 3, "draft": 0}


def test_a_draft_that_is_not_frozen_must_come_with_the_target(policies, draft_paths):
    engine = drafted(policies, draft_paths[0], frozen=False)
    digest = engine.weights_digest()
    with pytest.raises(InvalidInputError, match=r"missing: draft\.fc\.weight"):
        engine.update_weights_from_tensor(policies[1].tensors.items())
    assert engine.weights_digest() == digest
    new = tensors_of(drafted(policies, draft_paths[1]))
    engine.update_weights_from_tensor(policies[1].tensors | new)
    assert engine.weight_versions == {"target": 1, "draft": 1}
    assert outputs(engine) == policies[1].outputs
    assert all(torch.equal(values, new[name]) for name, values in tensors_of(engine).items())
    engine.release_memory(keep_weights=False)
    engine.resume_memory()
    assert "every tensor of draft, target" in engine.unavailable_reason


def test_the_drafts_kv_and_weights_are_given_back(policies, draft_paths):
    engine = drafted(policies, draft_paths[0])
    alone = RolloutEngine.from_pretrained(policies[0].folder, "none", max_running=4)
    pool = engine.worker.drafter.runners[0].kv.pool
    before = outputs(engine)
    freed = engine.release_memory()
    assert freed["weights"] > alone.release_memory()["weights"]
    assert all(not tensor.untyped_storage().nbytes() for tensor in pool.keys + pool.values)
    engine.resume_memory()
    assert outputs(engine) == before
    assert engine.worker.counters()["draft/trees"] > 0


def running(engine):
    engine.submit(PROMPT, PARAMS)
    for _ in range(5):
        assert not engine.step()


def finish(engine):
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    return [(rollout.token_ids, rollout.logprobs) for rollout in ended]


def test_a_new_draft_in_the_middle_of_a_rollout(policies, draft_paths):
    engine = drafted(policies, draft_paths[0])
    expected = [(r.token_ids, r.logprobs) for r in engine.generate([PROMPT], PARAMS)]
    new = tensors_of(drafted(policies, draft_paths[1]))
    running(engine)
    (request,) = engine.scheduler.running
    computed = request.computed_len
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


@pytest.mark.parametrize("layout", ["separate", "qwen3_next"])
def test_a_chain_from_a_folder(tmp_path, layout):
    target, chain = save_tiny_mtp(tmp_path, layout)
    engine = RolloutEngine.from_pretrained(target, "mtp", spec_options={"draft_path": str(chain)})
    digest = engine.weights_digest()
    parts = engine.worker.weights.parts
    zeros = {
        name: torch.zeros(each.shape)
        for step in ("draft_step_0", "draft_step_1")
        for name, each in parts[step].weight_loaders().items()
    }
    engine.update_weights_from_tensor(zeros, selector="draft")
    assert engine.weights_digest() != digest
    engine.update_weights_from_disk(chain, selector="draft")
    assert engine.weights_digest() == digest


def test_the_first_steps_of_a_longer_chain(tmp_path):
    """The others are neither held nor asked for, and a folder has them all the same."""
    target, chain = save_tiny_mtp(tmp_path, "separate", 3)
    options = {"draft_path": str(chain), "num_steps": 2, "calibration_seconds": 0}
    engine = RolloutEngine.from_pretrained(target, "mtp", spec_options=options)
    assert list(engine.worker.weights.parts) == ["target", "draft_step_0", "draft_step_1"]
    digest = engine.weights_digest()
    weight_loaders = engine.worker.weights.parts["draft_step_1"].weight_loaders()
    zeros = {name: torch.zeros(each.shape) for name, each in weight_loaders.items()}
    engine.update_weights_from_tensor(zeros, selector="draft_step_1")
    assert engine.weights_digest() != digest
    engine.update_weights_from_disk(chain, selector="draft")
    assert engine.weights_digest() == digest


def unknown(tensors):
    tensors["draft.fc.bias"] = torch.zeros(48)
    return r"unexpected: draft\.fc\.bias"


def missing(tensors):
    del tensors["draft.norm.weight"]
    return r"missing: draft\.norm\.weight"


def misshapen(tensors):
    tensors["draft.fc.weight"] = tensors["draft.fc.weight"][:-1]
    return r"wrong shape: draft\.fc\.weight"


@pytest.mark.parametrize("fault", [unknown, missing, misshapen])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_bad_draft_leaves_the_old_one_or_serves_nothing(policies, draft_paths, fault, one_by_one):
    engine = drafted(policies, draft_paths[0])
    digest, good = engine.weights_digest(), tensors_of(engine)
    bad = dict(good)
    message = fault(bad)
    expected = [(r.token_ids, r.logprobs) for r in engine.generate([PROMPT], PARAMS)]
    running(engine)
    pairs = (pair for pair in bad.items()) if one_by_one else bad.items()
    with pytest.raises(InvalidInputError, match=message):
        engine.update_weights_from_tensor(pairs, selector="draft")
    if engine.can_run:
        assert engine.weights_digest() == digest
    else:
        assert one_by_one
        with pytest.raises(WeightUpdateError, match=r"every tensor of draft$"):
            engine.step()
        assert engine.weights_digest("target") == policies[0].digest
        engine.update_weights_from_tensor(good.items(), selector="draft")
    assert finish(engine) == expected
