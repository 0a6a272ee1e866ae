"""Drafts that the trainer of the target does not send: left alone, kept, and reached by name."""

from __future__ import annotations

import pytest
import torch

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.runner.memory_saver import MemorySaver
from rollout.types import MemoryTag
from rollout.weights.transaction import WeightState, WeightTransaction
from rollout.weights.update_options import UpdateOptions
from tests.helpers.plain_part import PlainPart


def filled(*size: int, value: float) -> torch.Tensor:
    return torch.full(size, value)


@pytest.fixture
def chain() -> WeightTransaction:
    """A target and a frozen chain of two steps: both read its embedding, and share a head."""
    embedding, head = torch.zeros(3), torch.zeros(4)
    weights = WeightTransaction({"target": PlainPart({"embedding": embedding})})
    weights.parts.add(
        "draft_step_0",
        PlainPart({"draft.0": torch.zeros(2), "draft.head": head}, {"embedding": embedding}),
        frozen=True,
    )
    second = PlainPart({"draft.1": torch.zeros(2)}, {"embedding": embedding, "draft.head": head})
    weights.parts.add("draft_step_1", second, frozen=True)
    return weights


def send(weights: WeightTransaction, tensors: dict, *, one_by_one: bool = False, **options) -> None:
    weights.begin(UpdateOptions(**options))
    weights.load((pair for pair in tensors.items()) if one_by_one else tensors.items())
    weights.commit()


STEP_0 = {"draft.0": filled(2, value=5.0), "draft.head": filled(4, value=6.0)}
STEP_1 = {"draft.1": filled(2, value=7.0)}
TARGET = {"embedding": filled(3, value=8.0)}


def test_what_selectors_name(chain):
    selected = chain.parts.selected
    assert selected("all") == {"target"}
    assert selected("draft") == {"draft_step_0", "draft_step_1"}
    assert selected("draft_step_1") == {"draft_step_1"}
    single = WeightTransaction({"target": PlainPart({"a": torch.zeros(1)})})
    with pytest.raises(InvalidInputError, match=r"selector.*: all, target$"):
        single.parts.selected("draft")
    single.parts.add("draft", PlainPart({"draft.b": torch.zeros(1)}))
    assert single.parts.selected("all") == {"target", "draft"}
    assert single.parts.selected("draft") == {"draft"}
    with pytest.raises(InvalidInputError, match="all, draft, target"):
        single.parts.selected("draft_step_0")


def test_a_stream_of_the_target_is_all_there_is_to_send(chain):
    before = chain.digest("draft")
    whole = chain.digest("all")
    send(chain, TARGET)
    # The embedding they read is the target's, and follows it.
    assert chain.parts["draft_step_0"].tensors["embedding"].mean() == 8
    assert chain.digest("draft") != before
    assert chain.digest("all") != whole
    assert [part.finished for part in chain.parts.values()] == [1, 0, 0]
    own = {name: chain.parts[name].own for name in ("draft_step_0", "draft_step_1")}
    assert all(not tensor.any() for part in own.values() for tensor in part.values())


def test_a_frozen_parts_names_are_unknown_to_all(chain):
    with pytest.raises(InvalidInputError, match=r"unexpected: draft\.1"):
        send(chain, TARGET | STEP_1)
    assert chain.serves


def test_its_own_selector_reaches_it(chain):
    target = chain.digest("target")
    send(chain, STEP_0 | STEP_1, selector="draft")
    assert chain.parts["draft_step_1"].tensors["draft.head"].mean() == 6
    assert chain.digest("target") == target
    send(chain, {"draft.1": filled(2, value=1.0)}, selector="draft_step_1")
    assert chain.parts["draft_step_1"].own["draft.1"].mean() == 1
    assert chain.parts["draft_step_0"].own["draft.0"].mean() == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (STEP_0 | STEP_1 | {"draft.2": torch.zeros(2)}, r"unexpected: draft\.2"),
        (STEP_0, r"missing: draft\.1"),
        (STEP_0 | {"draft.1": torch.zeros(3)}, r"wrong shape: draft\.1 is \[3\]"),
        (STEP_0 | {"draft.1": torch.zeros(2, dtype=torch.int32)}, r"wrong dtype: draft\.1"),
        (STEP_0 | {"draft.1": filled(2, value=float("nan"))}, r"draft\.1.*NaN"),
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_bad_draft(chain, wrong, message, one_by_one):
    """Checked before a byte moves where all of it is known; else torn, and healed by itself."""
    digest = chain.digest("all")
    with pytest.raises(InvalidInputError, match=message):
        send(chain, wrong, one_by_one=one_by_one, selector="draft", check_finite=True)
    assert chain.serves == (chain.state is WeightState.WHOLE)
    assert chain.serves == (chain.digest("all") == digest)
    if not chain.serves:
        with pytest.raises(WeightUpdateError, match="every tensor of draft_step_0, draft_step_1"):
            chain.require_whole()
    send(chain, STEP_0 | STEP_1, selector="draft")
    assert chain.serves


def tear(weights: WeightTransaction, selector: str, pairs: dict[str, torch.Tensor]) -> None:
    weights.begin(UpdateOptions(selector=selector))
    weights.load(pairs.items())
    weights.abandon(f"the sender of {selector} died")


def test_a_torn_draft_serves_nothing_and_hinders_no_update_of_the_target(chain):
    tear(chain, "draft_step_1", STEP_1)
    assert not chain.serves
    send(chain, TARGET)
    assert chain.state is WeightState.TORN
    assert "draft_step_1 died" in chain.reason
    with pytest.raises(WeightUpdateError, match="cannot heal"):
        chain.begin(UpdateOptions(selector="draft", partial=True))
    send(chain, STEP_1, selector="draft_step_1")
    assert chain.serves


def test_a_torn_target_is_healed_first(chain):
    """A draft's trainer may send the embedding along: there is nothing to compare it with."""
    tear(chain, "all", TARGET)
    tear_reason = chain.reason
    with pytest.raises(WeightUpdateError, match="cannot heal"):
        chain.begin(UpdateOptions(selector="draft"))
    assert chain.reason == tear_reason
    send(chain, TARGET)
    assert chain.serves


def test_both_torn_are_healed_one_by_one(chain):
    tear(chain, "draft", STEP_0)
    tear(chain, "all", TARGET)
    assert "draft died" in chain.reason
    assert "all died" in chain.reason
    assert "draft_step_0, draft_step_1, target" in chain.reason
    send(chain, TARGET)
    assert "every tensor of draft_step_0, draft_step_1" in chain.reason
    assert "all died" not in chain.reason
    send(chain, STEP_0 | STEP_1, selector="draft")
    assert chain.serves


@pytest.mark.parametrize("keep", [False, True])
def test_a_frozen_parts_values_outlast_any_release(chain, keep):
    send(chain, TARGET)
    send(chain, STEP_0 | STEP_1, selector="draft")
    digest = chain.digest("all")
    memory_saver = MemorySaver(chain, [])
    freed = memory_saver.release([MemoryTag.WEIGHTS], keep_weights=keep)
    assert freed[MemoryTag.WEIGHTS] == 4 * (3 + 2 + 4 + 2), "drafts' memory is given back too"
    memory_saver.resume([MemoryTag.WEIGHTS])
    assert chain.serves == keep
    if not keep:
        assert "every tensor of target" in chain.reason
        assert "draft" not in chain.reason
        send(chain, TARGET)
    assert chain.serves
    assert chain.digest("all") == digest


def test_a_frozen_part_that_cannot_be_brought_back_is_torn(chain):
    memory_saver = MemorySaver(chain, [])
    memory_saver.release([MemoryTag.WEIGHTS], keep_weights=False)
    kept = memory_saver._backup
    kept._files[0].write_bytes(b"")
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid|header"):
        memory_saver.resume([MemoryTag.WEIGHTS])
    assert not memory_saver.released
    send(chain, TARGET)
    assert "could not be brought back" in chain.reason
    assert not chain.serves
