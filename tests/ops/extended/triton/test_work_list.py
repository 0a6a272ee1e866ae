"""The list of a step's attention: each row's splits are there once, and no list exceeds what its
step's shapes say."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.paged_attention.plan import BLOCK
from rollout.ops.paged_attention.work_list import (
    SPLIT_BLOCKS,
    Limits,
    ListSizes,
    list_sizes,
    work_list,
)
from tests.helpers.attention_cases import Entry, on, plan_of

SPLIT = SPLIT_BLOCKS * BLOCK


@dataclass
class Item:
    entry: int
    first_row: int
    rows: int
    first_split: int
    end_split: int
    part_row: int


@dataclass
class Fold:
    first_row: int
    rows: int
    part_row: int
    parts: int


def listed(
    plan: AttentionPlan, rows: int, limits: Limits, device: torch.device
) -> tuple[list[Item], list[Fold], ListSizes]:
    """With room for more than fits, so that what exceeds the sizes shows."""
    sizes = list_sizes(plan, rows, limits)
    roomy = sizes._replace(items=2 * sizes.items + 100, folds=2 * sizes.folds + 100)
    work = work_list(on(device, plan), rows, limits, roomy)
    items = [Item(*fields) for fields in work.items_I6.tolist()]
    folds = [Fold(*fields) for fields in work.folds_F4.tolist()]
    num_items, num_folds = work.counts_2.tolist()
    return items[:num_items], folds[:num_folds], sizes


def keys_seen(plan: AttentionPlan, rows: int) -> list[int]:
    """By row; of a node as if it were behind all nodes before it. Padding sees none."""
    seen = [0] * rows
    offsets = plan.node_offsets_B1.diff().tolist()
    ends = plan.q_offsets_B1.tolist()
    contexts = (plan.starts_B + plan.run_lens_B).tolist()
    for first, end, context, nodes in zip(ends, ends[1:], contexts, offsets, strict=False):
        for row in range(first, end):
            seen[row] = context + min(BLOCK - 1, nodes - (end - 1 - row))
    return seen


def check(plan: AttentionPlan, rows: int, limits: Limits, device: torch.device) -> list[Item]:
    """Returns the items."""
    items, folds, sizes = listed(plan, rows, limits, device)
    assert len(items) <= sizes.items
    assert len(folds) <= sizes.folds
    wanted = keys_seen(plan, rows)
    splits: list[list[int]] = [[] for _ in range(rows)]
    for item in items:
        for row in range(item.first_row, item.first_row + item.rows):
            splits[row] += range(item.first_split, item.end_split)
    assert all(found == list(range(len(found))) for found in splits), "each once, in order"
    for found, keys in zip(splits, wanted, strict=True):
        assert len(found) >= max(1, -(-keys // SPLIT))
    last = {item.first_row: item for item in items}
    for item in last.values():  # none without work: its last row sees something of the last split
        assert item.end_split == 1 or wanted[item.first_row + item.rows - 1] > SPLIT * (
            item.end_split - 1
        )
    # Parts lie side by side, and a fold reads those that its tile's items write.
    written: dict[int, int] = {}
    for item in items:
        if item.part_row < 0:
            assert item.first_split == 0
            continue
        count = item.end_split - item.first_split if item.first_split else 1
        for part in range(count):
            for row in range(item.rows):
                assert written.setdefault(item.part_row + part * item.rows + row, item.first_row) \
                    == item.first_row  # fmt: skip
    assert sorted(written) == list(range(len(written)))
    assert len(written) <= sizes.part_rows
    read = {
        fold.part_row + index: fold.first_row
        for fold in folds
        for index in range(fold.parts * fold.rows)
    }
    assert read == written
    return items


def random_step(rng: random.Random) -> tuple[AttentionPlan, int]:
    """Runs, trees and padding in any mixture, some of whose entries have only their last rows."""
    most = rng.choice([200, 3000, 40_000])
    entries, kept = [], []
    for _ in range(rng.choice([0, 1, 3, 9, 40])):
        run_len = rng.choice([1, 1, 1, rng.randint(1, 300)])
        nodes = rng.choice([0, rng.randint(0, 20), 63])
        entries.append(Entry(rng.randint(0, most), run_len, [0] * nodes))
        kept.append(rng.choice([run_len + nodes, rng.randint(0, run_len + nodes)]))
    plan = plan_of(entries)
    longest = max((e.start + e.run_len for e in entries), default=1)
    plan.req_to_token = torch.zeros(1, longest, dtype=torch.int32)
    plan.q_offsets_B1 = torch.tensor([0, *kept]).cumsum(0).int()
    return plan, sum(kept) + rng.choice([1, 7, 100])


def kinds(items: list[Item]) -> set[str]:
    """Whether tiles of several splits are whole, cut into single splits or into longer items."""
    found = set()
    for item in items:
        size = item.end_split - item.first_split
        if item.part_row < 0:
            found |= {"whole"} if size > 1 else set()
        elif not item.first_split:
            found |= {"single"} if size == 1 else {"longer"}
    return found


def test_lists_of_any_step_are_whole_and_within_their_sizes(device) -> None:
    rng, found = random.Random(0), set()
    for _ in range(30):
        plan, rows = random_step(rng)
        limits = Limits(
            tile_queries=rng.choice([1, 2, 4, 16, 64]),
            programs=rng.choice([1, 3, 33, 500]),
            part_rows=rng.choice([0, 50, 1000, 10**6]),
        )
        found |= kinds(check(plan, rows, limits, device))
    assert found == {"whole", "single", "longer"}


def test_only_what_makes_the_list_end_sooner_is_cut(device) -> None:
    def items(contexts: list[int], programs: int) -> list[Item]:
        plan = plan_of([Entry(context - 1, 1) for context in contexts])
        plan.req_to_token = torch.zeros(1, max(contexts), dtype=torch.int32)
        limits = Limits(tile_queries=16, programs=programs, part_rows=10**6)
        return check(plan, len(contexts), limits, device)

    assert kinds(items([4 * SPLIT] * 32, programs=33)) == {"whole"}  # a round of four splits
    assert kinds(items([4 * SPLIT] * 64, programs=33)) == {"whole"}  # two, of 66 places
    assert kinds(items([4 * SPLIT] * 40, programs=33)) == {"single"}  # two, of which one is empty
    assert kinds(items([4 * SPLIT], programs=33)) == {"single"}
    assert len(items([64 * SPLIT] + [4 * SPLIT] * 31, programs=33)) > 60  # one walk of 64 else
