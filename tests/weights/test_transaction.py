"""The states of an update over a target and a draft, with plain tensors and no engine."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.models.layers.weight_loader import WeightLoader, with_alias
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.manifest import TensorSpec
from rollout.weights.source import TensorSource
from rollout.weights.transaction import WeightState, WeightTransaction
from rollout.weights.update_options import UpdateOptions
from tests.helpers.plain_part import PlainPart


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


EMBEDDING = ("embedding", torch.full((3,), 7.0))
LAYER = ("layer", torch.full((2,), 8.0))
DRAFT = ("draft_layer", torch.full((2,), 9.0))
ALL = [EMBEDDING, LAYER, DRAFT]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def weights(clock: Clock) -> WeightTransaction:
    """A target, and a draft that shares its embedding."""
    embedding = torch.zeros(3)
    target = PlainPart({"embedding": embedding, "layer": torch.zeros(2)})
    draft = PlainPart({"draft_layer": torch.zeros(2)}, {"embedding": embedding})
    return WeightTransaction({"target": target, "draft": draft}, clock)


def values(weights: WeightTransaction) -> list[float]:
    target, draft = weights.parts["target"], weights.parts["draft"]
    return [t.mean().item() for t in (*target.tensors.values(), *draft.tensors.values())]


def update(weights: WeightTransaction, pairs, **options) -> None:
    weights.begin(UpdateOptions(**options))
    weights.load(TensorSource(pairs))
    weights.commit()


def test_an_update_reaches_what_its_selector_names(weights):
    update(weights, [DRAFT], selector="draft")
    assert values(weights) == [0, 0, 0, 9]
    update(weights, [EMBEDDING, LAYER], selector="target")
    assert values(weights) == [7, 8, 7, 9]
    assert weights.versions == {"target": 1, "draft": 1}
    update(weights, [(name, tensor * 2) for name, tensor in ALL])
    assert values(weights) == [14, 16, 14, 18]
    assert tuple(part.finished for part in weights.parts.values()) == (2, 2)
    with pytest.raises(InvalidInputError, match="all, draft, target"):
        weights.begin(UpdateOptions(selector="draft_step_0"))
    assert not weights.is_under_way


def test_a_draft_cannot_change_the_embedding_that_it_borrows(weights):
    """A draft's trainer may send it along."""
    before = weights.digest("target")
    update(weights, ALL, selector="draft")
    assert values(weights) == [0, 0, 0, 9]
    assert weights.digest("target") == before
    assert weights.num_tensors == {"stored/draft": 1, "ignored/target": 2}


def test_parts_with_a_name_in_common_and_nothing_else_are_refused():
    with pytest.raises(InvalidInputError, match="both have a norm of their own"):
        WeightTransaction(
            {name: PlainPart({"norm": torch.zeros(2)}) for name in ("target", "draft")}
        )


def test_unknown_names_and_missing_ones_are_refused_before_a_byte_moves(weights):
    with pytest.raises(InvalidInputError, match="unexpected: odd"):
        update(weights, [*ALL, ("odd", torch.zeros(2))], selector="target")
    manifest = {name: TensorSpec.of(tensor) for name, tensor in (EMBEDDING, LAYER)}
    with pytest.raises(InvalidInputError, match="missing: draft_layer"):
        weights.begin(UpdateOptions(), manifest)
    wrapped = [(f"module.{name}", tensor) for name, tensor in ALL]
    for pairs in (wrapped, iter(wrapped)):
        weights.begin(UpdateOptions())
        with pytest.raises(InvalidInputError, match=r"^named_.*names begin with `module\.`"):
            weights.load(TensorSource(pairs))
    assert weights.state is WeightState.WHOLE
    assert weights.version == 0
    assert values(weights) == [0, 0, 0, 0]


def test_the_states_of_an_update(weights):
    weights.begin(UpdateOptions())
    assert weights.state is WeightState.OPEN
    assert weights.serves, "no byte has moved"
    weights.load(TensorSource([EMBEDDING]))
    assert weights.state is WeightState.LOADING
    assert not weights.serves
    with pytest.raises(WeightUpdateError, match="under way"):
        weights.begin(UpdateOptions())
    weights.load(TensorSource([LAYER]))
    weights.load(TensorSource([DRAFT]))
    weights.commit()
    assert weights.state is WeightState.WHOLE
    assert weights.serves
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        weights.load(TensorSource([LAYER]))
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        weights.commit()
    weights.begin(UpdateOptions())
    weights.abandon("never mind")
    assert weights.state is WeightState.WHOLE
    update(weights, ALL)
    assert weights.version == 2


def test_what_is_torn_is_healed_by_a_full_update_of_it_alone(weights):
    weights.begin(UpdateOptions(selector="target"))
    weights.load(TensorSource([LAYER]))
    weights.abandon("the trainer died")
    assert weights.state is WeightState.TORN
    assert "the trainer died" in weights.reason
    for options in ({"partial": True}, {"selector": "draft"}):
        with pytest.raises(WeightUpdateError, match="cannot heal"):
            weights.begin(UpdateOptions(**options))
    # An attempt that fails before a byte moves leaves it torn.
    with pytest.raises(InvalidInputError, match="unexpected"):
        weights.begin(UpdateOptions(selector="target"), {"nonsense": TensorSpec((1,), torch.float)})
    weights.begin(UpdateOptions(selector="target"))
    assert not weights.serves
    weights.abandon("again")
    assert weights.state is WeightState.TORN
    update(weights, [EMBEDDING, LAYER], selector="target")
    assert weights.serves
    assert not weights.reason


def test_two_failures_tear_both_parts(weights):
    for selector, pair in (("target", LAYER), ("all", DRAFT)):
        weights.begin(UpdateOptions(selector=selector))
        weights.load(TensorSource([pair]))
        weights.abandon("died")
    update(weights, [EMBEDDING, LAYER], selector="target")
    assert "every tensor of draft" in weights.reason
    assert not weights.serves
    update(weights, ALL)
    assert weights.serves


def test_silence_tears_and_talk_does_not(weights, clock):
    weights.begin(UpdateOptions(timeout=10))
    for pair in ALL:
        clock.now += 9
        weights.load(TensorSource([pair]))
    weights.commit()
    weights.begin(UpdateOptions(timeout=10))
    weights.load(TensorSource([LAYER]))
    clock.now += 11
    assert not weights.is_under_way
    with pytest.raises(WeightUpdateError, match="nothing came for 10 seconds"):
        weights.require_whole()
    with pytest.raises(WeightUpdateError, match="nothing came for 10 seconds"):
        weights.load(TensorSource([EMBEDDING]))
    update(weights, ALL)
    weights.begin(UpdateOptions(timeout=10))
    clock.now += 11
    weights.require_whole()  # no byte had come
    update(weights, ALL)


def test_what_was_announced_must_come_as_announced(weights):
    manifest = {name: TensorSpec.of(tensor) for name, tensor in ALL}
    for pair, message in (
        (("layer", torch.zeros(2, dtype=torch.bfloat16)), "not as announced: layer"),
        (("layer", torch.zeros(4)), "wrong shape: layer"),
    ):
        weights.begin(UpdateOptions(), manifest)
        with pytest.raises(InvalidInputError, match=message):
            weights.load(TensorSource([pair]))
        assert not weights.is_under_way
    weights.begin(UpdateOptions(), manifest)
    weights.load(TensorSource([EMBEDDING]))
    with pytest.raises(InvalidInputError, match="came twice: embedding"):
        weights.load(TensorSource([EMBEDDING]))
    assert weights.state is WeightState.TORN


def test_direct_converts_nothing(weights):
    wrong = [EMBEDDING, LAYER, ("draft_layer", DRAFT[1].bfloat16())]
    weights.begin(UpdateOptions())
    with pytest.raises(InvalidInputError, match="wrong dtype: draft_layer"):
        weights.load(TensorSource(wrong, "direct"))
    assert weights.serves, "found before a byte moved"
    manifest = {name: TensorSpec.of(tensor) for name, tensor in wrong}
    weights.begin(UpdateOptions(), manifest)
    with pytest.raises(InvalidInputError, match="wrong dtype: draft_layer"):
        weights.load(TensorSource(iter(wrong[::-1]), "direct"))
    update(weights, wrong)
    assert values(weights) == [7, 8, 7, 9]


def test_partial_updates_keep_the_rest(weights):
    update(weights, ALL)
    update(weights, [("layer", torch.full((2,), 5.0))], partial=True)
    assert values(weights) == [7, 5, 7, 9]
    with pytest.raises(InvalidInputError, match="must bring a tensor"):
        update(weights, [], partial=True)
    assert weights.version == 2
    update(weights, [], partial=True, weight_version=9)
    assert values(weights) == [7, 5, 7, 9]
    assert weights.version == 9


def test_options_that_make_no_sense_are_refused_by_name():
    for name, wrong in {
        "weight_version": ("7", True, -1, 2**63),
        "base_version": (-1,),
        "timeout": (0, float("nan"), "5"),
        "lora_scaling": ("1", float("inf"), {"layer": None}),
        "partial": ("no",),
        "flush_cache": ("no",),
        "check_finite": ("no",),
        "abort_all_requests": ("no",),
    }.items():
        for value in wrong:
            with pytest.raises(InvalidInputError) as error:
                UpdateOptions(**{name: value})
            assert error.value.field == name, value
    with pytest.raises(InvalidInputError, match=r"version=.*weight_version, partial"):
        UpdateOptions.of({"version": 3})


def test_what_cannot_be_copied_is_refused_before_a_byte_moves(weights):
    for tensor in (
        torch.zeros(2).numpy(),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
    ):
        weights.begin(UpdateOptions())
        with pytest.raises(InvalidInputError, match="layer"):
            weights.load(TensorSource([EMBEDDING, ("layer", tensor), DRAFT]))
        assert weights.serves
        assert values(weights) == [0, 0, 0, 0]


class Tied(PlainPart):
    """A part whose one tensor has two names."""

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return with_alias("embedding", "head", WeightLoader.of(self.own["embedding"]))


def test_tied_names_must_bring_the_same_values(tmp_path):
    tied = torch.zeros(2)
    weights = WeightTransaction({"target": Tied({"embedding": tied})})
    save_file({"embedding": torch.ones(2), "head": torch.zeros(2)}, tmp_path / "model.safetensors")
    weights.begin(UpdateOptions())
    with pytest.raises(InvalidInputError, match="tied twin"):
        weights.load(CheckpointSource(tmp_path))
    assert weights.state is WeightState.WHOLE
    assert tied.tolist() == [0, 0]
    broken = torch.tensor([float("nan"), 1.0])
    update(weights, [("embedding", broken), ("head", broken.clone())])
    with pytest.raises(InvalidInputError, match="tied twin"):
        update(weights, [("embedding", broken), ("head", torch.zeros(2))])


def test_a_draft_counts_versions_of_its_own(weights):
    assert weights.versions == {"target": 0, "draft": 0}
    update(weights, [DRAFT], selector="draft")
    update(weights, [DRAFT], selector="draft", weight_version=7)
    assert weights.versions == {"target": 0, "draft": 7}
    assert weights.version == 0
    update(weights, ALL, weight_version=3)
    assert weights.versions == {"target": 3, "draft": 8}
    update(weights, [DRAFT], selector="draft", weight_version=8)  # a label: no token carries it
    with pytest.raises(InvalidInputError, match="weight_version"):
        weights.begin(UpdateOptions(weight_version=3))


def test_an_update_that_fails_counts_nowhere(weights):
    weights.begin(UpdateOptions(selector="draft"))
    with pytest.raises(InvalidInputError):
        weights.load(TensorSource([("odd", torch.zeros(2)), DRAFT]))
    assert weights.versions == {"target": 0, "draft": 0}
    weights.begin(UpdateOptions(selector="draft"))
    assert not weights.reaches_target
    weights.abandon("no more")
    weights.begin(UpdateOptions())
    assert weights.reaches_target
