"""The states of an update over a target and drafts, by themselves: no engine, plain tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.models.layers.weight_loader import WeightLoader, with_alias
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.manifest import TensorSpec
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
    weights.load(pairs)
    weights.commit()


@pytest.mark.parametrize(
    ("selector", "pairs", "expected", "finished"),
    [
        ("all", ALL, [7, 8, 7, 9], (1, 1)),
        ("target", [EMBEDDING, LAYER], [7, 8, 7, 0], (1, 0)),
        ("draft", [DRAFT], [0, 0, 0, 9], (0, 1)),
    ],
)
def test_an_update_reaches_what_its_selector_names(weights, selector, pairs, expected, finished):
    update(weights, pairs, selector=selector)
    assert values(weights) == expected
    assert tuple(weights.versions.values()) == finished
    assert tuple(part.finished for part in weights.parts.values()) == finished


def test_what_a_draft_borrows_is_the_targets_alone(weights):
    """A draft's trainer may send the embedding along; it cannot change it."""
    same = ("embedding", torch.zeros(3))
    update(weights, [same, DRAFT], selector="draft")
    assert values(weights) == [0, 0, 0, 9]
    before = weights.digest("target")
    weights.begin(UpdateOptions(selector="draft"))
    weights.load([DRAFT])
    with pytest.raises(InvalidInputError, match="is the target's"):
        weights.load([EMBEDDING])
    assert weights.digest("target") == before
    assert "every tensor of draft" in weights.reason
    update(weights, [DRAFT], selector="draft")
    assert weights.serves


def test_parts_with_a_name_in_common_and_nothing_else_are_refused():
    with pytest.raises(InvalidInputError, match="both have a norm of their own"):
        WeightTransaction(
            {name: PlainPart({"norm": torch.zeros(2)}) for name in ("target", "draft")}
        )


def test_a_frozen_draft_is_never_touched(weights):
    before = weights.digest("draft")
    with pytest.raises(InvalidInputError, match="draft_layer"):
        update(weights, ALL, selector="target")
    assert weights.digest("draft") == before
    assert weights.serves
    assert weights.version == 0


def test_an_update_that_misses_a_draft_is_refused_whole(weights):
    """The draft's tensors are announced to be missing before the target's first byte moves."""
    manifest = {name: TensorSpec.of(tensor) for name, tensor in (EMBEDDING, LAYER)}
    with pytest.raises(InvalidInputError, match="missing: draft_layer"):
        weights.begin(UpdateOptions(), manifest)
    assert weights.state is WeightState.WHOLE
    assert values(weights) == [0, 0, 0, 0]


def test_an_unknown_selector_lists_those_there_are(weights):
    with pytest.raises(InvalidInputError, match="all, draft, target"):
        weights.begin(UpdateOptions(selector="draft_step_0"))
    assert not weights.is_under_way


def test_the_states(weights):
    weights.begin(UpdateOptions())
    assert weights.state is WeightState.OPEN
    assert weights.serves, "no byte has moved"
    weights.load([EMBEDDING])
    assert weights.state is WeightState.LOADING
    assert not weights.serves
    with pytest.raises(WeightUpdateError, match="under way"):
        weights.begin(UpdateOptions())
    weights.load([LAYER])
    weights.load([DRAFT])
    weights.commit()
    assert weights.state is WeightState.WHOLE
    assert weights.serves
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        weights.load([LAYER])
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        weights.commit()


def test_given_up_before_a_byte_nothing_has_happened(weights):
    weights.begin(UpdateOptions())
    weights.abandon("never mind")
    assert weights.state is WeightState.WHOLE
    update(weights, ALL)
    assert weights.version == 1


def test_what_is_torn_is_healed_by_a_full_update_of_it_alone(weights):
    weights.begin(UpdateOptions(selector="target"))
    weights.load([LAYER])
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
        weights.load([pair])
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
        weights.load([pair])
    weights.commit()
    weights.begin(UpdateOptions(timeout=10))
    weights.load([LAYER])
    clock.now += 11
    assert not weights.is_under_way
    with pytest.raises(WeightUpdateError, match="nothing came for 10 seconds"):
        weights.require_whole()
    with pytest.raises(WeightUpdateError, match="nothing came for 10 seconds"):
        weights.load([EMBEDDING])
    update(weights, ALL)
    weights.require_whole()


def test_silence_before_the_first_byte_leaves_the_old_weights_serving(weights, clock):
    weights.begin(UpdateOptions(timeout=10))
    clock.now += 11
    weights.require_whole()
    update(weights, ALL)


def test_what_was_announced_must_come_as_announced(weights):
    manifest = {name: TensorSpec.of(tensor) for name, tensor in ALL}
    for pair, message in (
        (("layer", torch.zeros(2, dtype=torch.bfloat16)), "not as announced: layer"),
        (("layer", torch.zeros(4)), "wrong shape: layer"),
    ):
        weights.begin(UpdateOptions(), manifest)
        with pytest.raises(InvalidInputError, match=message):
            weights.load([pair])
        assert not weights.is_under_way
    weights.begin(UpdateOptions(), manifest)
    weights.load([EMBEDDING])
    with pytest.raises(InvalidInputError, match="came twice: embedding"):
        weights.load([EMBEDDING])
    assert weights.state is WeightState.TORN


def test_a_source_is_closed_however_it_ends(weights):
    closed = []

    def source(pairs):
        try:
            yield from pairs
        finally:
            closed.append(True)

    for pairs in (ALL, [("nonsense", torch.zeros(1)), *ALL]):
        weights.begin(UpdateOptions())
        tensors = source(pairs)  # kept alive: collecting it must not be what closes it
        if pairs is ALL:
            weights.load(tensors)
        else:
            with pytest.raises(InvalidInputError, match="nonsense"):
                weights.load(tensors)
        assert closed.pop()
        weights.abandon("seen enough")


def test_direct_converts_nothing(weights):
    wrong = [EMBEDDING, LAYER, ("draft_layer", DRAFT[1].bfloat16())]
    weights.begin(UpdateOptions())
    with pytest.raises(InvalidInputError, match="wrong dtype: draft_layer"):
        weights.load(wrong, direct=True)
    assert weights.serves, "found before a byte moved"
    manifest = {name: TensorSpec.of(tensor) for name, tensor in wrong}
    weights.begin(UpdateOptions(), manifest)
    with pytest.raises(InvalidInputError, match="wrong dtype: draft_layer"):
        weights.load(iter(wrong[::-1]), direct=True)
    update(weights, wrong)
    assert values(weights) == [7, 8, 7, 9]


def test_partial_updates_keep_the_rest(weights):
    update(weights, ALL)
    update(weights, [("layer", torch.full((2,), 5.0))], partial=True)
    assert values(weights) == [7, 5, 7, 9]
    with pytest.raises(InvalidInputError, match="must bring a tensor"):
        update(weights, [], partial=True)
    assert weights.version == 2


@pytest.mark.parametrize("version", ["7", True, 1.0, -1, 2**63])
def test_a_version_is_an_integer(version):
    with pytest.raises(InvalidInputError, match="weight_version"):
        UpdateOptions(weight_version=version)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", True])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(InvalidInputError, match="timeout"):
        UpdateOptions(timeout=timeout)


@pytest.mark.parametrize("name", ["partial", "flush_cache", "check_finite", "abort_all_requests"])
def test_a_switch_is_a_switch(name):
    with pytest.raises(InvalidInputError, match=name):
        UpdateOptions(**{name: "no"})


def test_an_unknown_option_lists_those_there_are():
    with pytest.raises(InvalidInputError, match=r"version=.*weight_version, partial"):
        UpdateOptions.of({"version": 3})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2).numpy(),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
    ],
)
def test_what_cannot_be_copied_is_refused_before_a_byte_moves(weights, tensor):
    weights.begin(UpdateOptions())
    with pytest.raises(InvalidInputError, match="layer"):
        weights.load([EMBEDDING, ("layer", tensor), DRAFT])
    assert weights.serves
    assert values(weights) == [0, 0, 0, 0]


class Tied(PlainPart):
    """A part whose one tensor has two names."""

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return with_alias("embedding", "head", WeightLoader.of(self.own["embedding"]))


def test_tied_names_may_both_bring_the_same_nan():
    weights = WeightTransaction({"target": Tied({"embedding": torch.zeros(2)})})
    broken = torch.tensor([float("nan"), 1.0])
    update(weights, [("embedding", broken), ("head", broken.clone())])
    with pytest.raises(InvalidInputError, match="tied twin"):
        update(weights, [("embedding", broken), ("head", torch.zeros(2))])


def test_a_folder_whose_tied_names_differ_changes_nothing(tmp_path):
    tied = torch.zeros(2)
    save_file({"embedding": torch.ones(2), "head": torch.zeros(2)}, tmp_path / "model.safetensors")
    weights = WeightTransaction({"target": Tied({"embedding": tied})})
    weights.begin(UpdateOptions())
    with pytest.raises(InvalidInputError, match="tied twin"):
        weights.load(CheckpointSource(tmp_path))
    assert weights.state is WeightState.WHOLE
    assert tied.tolist() == [0, 0]


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
        weights.load([LAYER, DRAFT])
    assert weights.versions == {"target": 0, "draft": 0}
    weights.begin(UpdateOptions(selector="draft"))
    assert not weights.reaches_target
    weights.abandon("no more")
    weights.begin(UpdateOptions())
    assert weights.reaches_target
