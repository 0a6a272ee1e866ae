"""Batches that nobody waits behind, played to their end through the budget on a made-up machine."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from rollout.types import (
    Batch,
    EntryResult,
    FinishReason,
    Remaining,
    Scheduled,
    StepTimes,
    Tail,
)
from tests.helpers.budgets import make_budget
from tests.helpers.requests import make_request, make_trees

SLOTS = 2
DRAFTING = 0.2  # milliseconds of a step that proposes


def forward_ms(rows):
    return 12.0 + 1.15 * rows


def speedup(*, width, limit, mean, found, right, knows_tail, batches):
    """Plain decoding's time over that with drafts.

    Args:
        mean: tokens after which a request ends, if its limit does not end it.
        found: share of the requests that have a chain of two draft tokens, in each step.
        right: probability of each to be right, where those before it were.
    """
    rng = np.random.default_rng(1)
    budget = make_budget(forward_ms, ("any",))
    plain_ms = ours_ms = 0.0
    for number in range(batches):
        lengths = np.minimum(rng.geometric(1 / mean, width), limit)
        alive = (lengths[:, None] > np.arange(lengths.max())).sum(axis=0)
        plain_ms += float(forward_ms(alive).sum())
        requests = [make_request([1], request_id=number * width + i) for i in range(width)]
        done = dict.fromkeys(range(width), 0)
        while done:
            entries = [
                Scheduled(
                    request=requests[i],
                    start=0,
                    run_len=1,
                    draft_slots=np.arange(
                        min(SLOTS, limit - done[i] - 1) if budget.may_draft else 0
                    ),
                )
                for i in done
            ]
            batch = Batch(step=0, entries=entries)
            if knows_tail:
                left = {requests[i].request_id: limit - count for i, count in done.items()}
                batch.tail = Tail(replaced=0.0, remaining=partial(remaining, mean=mean, left=left))
            budget.begin_step(batch)
            proposed = propose(budget, batch, rng, found, right)
            verified = budget.choose(batch, proposed)
            results = []
            for i, size in zip(list(done), np.diff(verified.trees.offsets_B1), strict=True):
                path = int(rng.geometric(1 - right)) - 1  # of the right chain's tokens
                accepted = min(path, int(size), int(lengths[i]) - done[i] - 1)
                done[i] += 1 + accepted
                ends = done[i] >= lengths[i]
                results.append(
                    EntryResult(
                        token_ids=[*range(accepted), accepted if path > accepted else 99],
                        path=list(range(1, accepted + 1)),
                        num_drafted=int(size),
                        finish_reason=FinishReason.LENGTH if ends else None,
                    )
                )
            done = {i: count for i, count in done.items() if count < lengths[i]}
            drafting = 0.0 if proposed is None else DRAFTING
            rows = len(entries) + verified.trees.num_nodes
            ours_ms += forward_ms(rows) + drafting
            budget.observe(batch, verified, results, StepTimes(draft=drafting))
    return plain_ms / ours_ms


def remaining(request, *, mean, left):
    return Remaining(mean, left[request.request_id])


def propose(budget, batch, rng, found, right):
    floors_B = budget.floors(batch)
    if floors_B is None or budget.wants_plain_step():
        return None
    sizes = [
        entry.draft_slots.size * int(rng.random() < found and floor <= 1.0)
        for entry, floor in zip(batch.entries, floors_B, strict=True)
    ]
    trees = make_trees([(list(range(size)), list(range(size))) for size in sizes])
    trees.probs_N = right ** trees.depths_N.astype(np.float32)
    return trees


@pytest.mark.parametrize(
    ("width", "limit", "mean", "found", "right", "least"),
    [
        (4, 48, 1e9, 0.45, 0.6, 1.06),
        (8, 48, 1e9, 0.6, 0.7, 1.05),
        (8, 48, 1e9, 0.3, 0.5, 0.99),
        (16, 200, 60, 0.6, 0.7, 1.18),
        (8, 48, 1e9, 0.9, 0.02, 0.98),  # drafts that are never right
    ],
)
def test_batches_are_never_slower_with_drafts_and_faster_where_they_pay(
    width, limit, mean, found, right, least
):
    case = {"width": width, "limit": limit, "mean": mean, "found": found, "right": right}
    ours, as_of_a_queue = (speedup(**case, knows_tail=knows, batches=30) for knows in (True, False))
    assert ours > as_of_a_queue - 0.02
    assert ours > least
    assert as_of_a_queue > min(least, 1.0) - 0.02
