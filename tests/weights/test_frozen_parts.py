"""Drafts that the target's trainer does not send are left alone, kept, and reached by name."""

from __future__ import annotations

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.runner.memory_saver import MemorySaver
from rollout.types import MemoryTag
from rollout.weights.source import TensorSource
from rollout.weights.transaction import WeightState, WeightTransaction
from rollout.weights.update_counts import UpdateCounts
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


def send(
    weights: WeightTransaction, tensors: dict, *, one_by_one: bool = False, **options
) -> UpdateCounts:
    weights.begin(UpdateOptions(**options))
    weights.load(
        TensorSource((pair for pair in tensors.items()) if one_by_one else tensors.items())
    )
    return weights.commit()


STEP_0 = {"draft.0": filled(2, value=5.0), "draft.head": filled(4, value=6.0)}
STEP_1 = {"draft.1": filled(2, value=7.0)}
TARGET = {"embedding": filled(3, value=8.0)}


def test_a_stream_of_the_target_is_all_there_is_to_send(chain):
    before = chain.digest("draft")
    whole = chain.digest("all")
    with pytest.raises(InvalidInputError, match=r"unexpected: draft\.2"):
        send(chain, TARGET | {"draft.2": torch.zeros(2)})
    assert chain.serves
    send(chain, TARGET)
    # The embedding they read is the target's, and follows it.
    assert chain.parts["draft_step_0"].tensors["embedding"].mean() == 8
    assert chain.digest("draft") != before
    assert chain.digest("all") != whole
    assert [part.finished for part in chain.parts.values()] == [1, 0, 0]
    own = {name: chain.parts[name].own for name in ("draft_step_0", "draft_step_1")}
    assert all(not tensor.any() for part in own.values() for tensor in part.values())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_every_tensor_is_counted_as_stored_or_ignored(chain, monkeypatch, caplog, one_by_one):
    monkeypatch.setattr(chain, "_passes_over", lambda name: name.startswith("visual."))
    everything = TARGET | STEP_0 | STEP_1 | {"visual.0": torch.zeros(1)}
    left = UpdateCounts({"target": 1}, {"draft_step_0": 2, "draft_step_1": 1, "none": 1})

    def sent(tensors: dict, **options) -> UpdateCounts:
        return send(chain, tensors, one_by_one=one_by_one, **options)

    assert sent(everything, selector="target") == left
    assert not caplog.records, "its selector says so"
    assert sent(everything) == left
    (warning,) = caplog.records
    assert "(2 of draft_step_0, 1 of draft_step_1)" in warning.getMessage()
    assert "spec.frozen=false" in warning.getMessage()
    assert sent(everything) == left
    target = chain.digest("target")
    newer = {name: tensor + 1 for name, tensor in everything.items()}
    own = sent(newer, selector="draft")
    assert own == UpdateCounts({"draft_step_0": 2, "draft_step_1": 1}, {"target": 1, "none": 1})
    assert chain.digest("target") == target
    only = sent(STEP_0 | STEP_1, selector="draft_step_1", partial=True)
    assert only == UpdateCounts({"draft_step_1": 1}, {"draft_step_0": 2})
    assert len(caplog.records) == 1, "once an engine"
    assert chain.num_tensors["stored/target"] == 3
    assert chain.num_tensors["ignored/draft_step_0"] == 8
    with pytest.raises(InvalidInputError, match=r"draft\.1.*must bring a tensor to store"):
        sent(STEP_1, partial=True)


def test_its_own_selector_reaches_a_frozen_part(chain):
    target = chain.digest("target")
    send(chain, STEP_0 | STEP_1, selector="draft")
    assert chain.parts["draft_step_1"].tensors["draft.head"].mean() == 6
    assert chain.digest("target") == target
    send(chain, {"draft.1": filled(2, value=1.0)}, selector="draft_step_1")
    assert chain.parts["draft_step_1"].own["draft.1"].mean() == 1
    assert chain.parts["draft_step_0"].own["draft.0"].mean() == 5


WRONG = [
    (STEP_0 | STEP_1 | {"draft.2": torch.zeros(2)}, r"unexpected: draft\.2"),
    (STEP_0, r"missing: draft\.1"),
    (STEP_0 | {"draft.1": torch.zeros(3)}, r"wrong shape: draft\.1 is \[3\]"),
    (STEP_0 | {"draft.1": torch.zeros(2, dtype=torch.int32)}, r"wrong dtype: draft\.1"),
    (STEP_0 | {"draft.1": filled(2, value=float("nan"))}, r"draft\.1.*NaN"),
]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_bad_draft_is_refused_before_a_byte_moves_or_tears_the_draft_alone(chain, one_by_one):
    for wrong, message in WRONG:
        digest = chain.digest("all")
        with pytest.raises(InvalidInputError, match=message):
            send(chain, wrong, one_by_one=one_by_one, selector="draft", check_finite=True)
        assert chain.serves == (chain.state is WeightState.WHOLE), message
        assert chain.serves == (not one_by_one and "missing" not in message), message
        assert chain.serves or chain.reason.endswith("every tensor of draft_step_0, draft_step_1")
        assert not chain.serves or chain.digest("all") == digest
        send(chain, STEP_0 | STEP_1, selector="draft")
        assert chain.serves


def tear(weights: WeightTransaction, selector: str, pairs: dict[str, torch.Tensor]) -> None:
    weights.begin(UpdateOptions(selector=selector))
    weights.load(TensorSource(pairs.items()))
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


@pytest.mark.parametrize("keep", [False, True])
def test_a_frozen_parts_values_outlast_a_release(chain, keep):
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


def test_an_update_of_a_draft_leaves_what_the_target_computed_and_its_version(policies):
    prompt, params = list(range(3, 40)), SamplingParams(max_new_tokens=60, seed=3, ignore_eos=True)
    engine = RolloutEngine.from_pretrained(policies[0].folder, max_running=4, chunk_len=16)
    engine.worker.weights.parts.add("draft", PlainPart({"draft.fc": torch.zeros(4)}))
    new = [("draft.fc", torch.ones(4))]
    request = engine.submit(prompt, params)
    for options in ({}, {"flush_cache": False}):
        assert not engine.step()
        assert not engine.step()
        computed, usage = request.computed_len, engine.worker.memory.usage
        engine.update_weights_from_tensor(new, selector="draft", **options)
        assert engine.scheduler.running == (request,)
        assert (request.computed_len, engine.worker.memory.usage) == (computed, usage)
    engine.update_weights_from_tensor(new, selector="draft", abort_all_requests=True)
    (aborted,) = engine.step()
    assert aborted.finish_reason == "abort"
    (whole,) = engine.generate([prompt], params)
    assert whole.token_ids[: len(aborted.token_ids)] == aborted.token_ids
    assert whole.weight_version_spans == [(0, 0, len(whole.token_ids))]
    engine.update_weights_from_tensor(new, selector="draft")
    assert engine.generate([prompt], params)[0].stats.cached_tokens == len(prompt) - 1
    engine.update_weights_from_tensor(policies[1].tensors, selector="target", weight_version=5)
    assert engine.weight_versions == {"target": 5, "draft": 4}
    (after,) = engine.generate([prompt], params)
    assert after.stats.cached_tokens == 0
    assert set(after.weight_versions) == {5}
