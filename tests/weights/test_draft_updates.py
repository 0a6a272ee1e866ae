"""A draft's update between two steps leaves what the target computed, and the tokens' version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.errors import WeightUpdateError
from tests.helpers.plain_part import PlainPart
from tests.weights.conftest import Policy

PROMPT = list(range(3, 40))
PARAMS = SamplingParams(max_new_tokens=60, seed=3, ignore_eos=True)


NEW_DRAFT = [("draft.fc.weight", torch.ones(4))]


@pytest.fixture
def drafted(policies: list[Policy]) -> Iterator[RolloutEngine]:
    engine = RolloutEngine.from_pretrained(policies[0].folder, max_running=4, chunk_len=16)
    draft = PlainPart({"draft.fc.weight": torch.zeros(4)})  # which nothing reads
    engine.worker.weights.parts.add("draft", draft)
    yield engine
    engine.check_integrity()


def running(engine: RolloutEngine, steps: int) -> None:
    engine.submit(PROMPT, PARAMS)
    for _ in range(steps):
        assert not engine.step()


def finish(engine: RolloutEngine) -> list:
    rollouts = []
    while engine.has_unfinished:
        rollouts += engine.step()
    return rollouts


@pytest.mark.parametrize("options", [{}, {"flush_cache": False}])
def test_running_requests_keep_their_kv_and_the_targets_version(drafted, options):
    running(drafted, steps=6)
    (request,) = drafted.scheduler.running
    computed, usage = request.computed_len, drafted.worker.memory.usage
    drafted.update_weights_from_tensor(NEW_DRAFT, selector="draft", **options)
    assert drafted.scheduler.running == (request,)
    assert request.computed_len == computed
    assert drafted.worker.memory.usage == usage
    (rollout,) = finish(drafted)
    expected = drafted.generate([PROMPT], PARAMS)[0]
    assert rollout.token_ids == expected.token_ids
    assert rollout.logprobs == expected.logprobs
    assert rollout.weight_version_spans == [(0, 0, len(rollout.token_ids))]
    assert drafted.weight_versions == {"target": 0, "draft": 1}


def test_the_prefix_cache_and_the_corpus_outlive_it(drafted):
    drafted.generate([PROMPT], PARAMS)
    corpus = drafted.worker.counters()
    drafted.update_weights_from_tensor(NEW_DRAFT, selector="draft")
    assert drafted.worker.counters() == corpus | {"weights/draft": 1}
    again = drafted.generate([PROMPT], PARAMS)[0]
    assert again.stats.cached_tokens == len(PROMPT) - 1


def test_requests_end_with_it_only_where_that_is_asked_for(drafted):
    running(drafted, steps=6)
    drafted.update_weights_from_tensor(NEW_DRAFT, selector="draft", abort_all_requests=True)
    (rollout,) = drafted.step()
    assert rollout.finish_reason == "abort"
    assert drafted.generate([PROMPT], PARAMS)[0].stats.cached_tokens > 0


def test_a_draft_that_is_half_written_serves_nothing_until_it_is_whole(drafted):
    running(drafted, steps=6)
    drafted.begin_weight_update(selector="draft")
    drafted.update_weights_from_tensor(NEW_DRAFT)
    with pytest.raises(WeightUpdateError, match="under way"):
        drafted.begin_weight_update(selector="target")
    drafted.abandon_weight_update()
    with pytest.raises(WeightUpdateError, match="torn"):
        drafted.step()
    drafted.update_weights_from_tensor(NEW_DRAFT, selector="draft")
    assert drafted.weight_versions == {"target": 0, "draft": 1}
    assert len(finish(drafted)) == 1


def test_new_weights_of_the_target_leave_the_drafts_number(drafted, policies):
    drafted.generate([PROMPT], PARAMS)
    drafted.update_weights_from_tensor(policies[1].tensors, selector="target", weight_version=5)
    assert drafted.weight_versions == {"target": 5, "draft": 0}
    rollout = drafted.generate([PROMPT], PARAMS)[0]
    assert rollout.stats.cached_tokens == 0
    assert set(rollout.weight_versions) == {5}
