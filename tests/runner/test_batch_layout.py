"""A step laid out at once is the step laid out entry by entry."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.runner.batch_layout import StepArrays
from rollout.types import Batch, Scheduled
from tests.helpers.requests import make_request, make_trees


def entry_by_entry(batch, trees, table, scored_from):
    """Plain: input ids, positions, slots, node slots and sampled rows."""
    ids, positions, slots, node_slots, sampled, total = [], [], [], [], [], 0
    for b, entry in enumerate(batch.entries):
        nodes = range(int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1]))
        for position in range(entry.start, entry.end):
            ids.append(entry.request.tokens[position])
            positions.append(position)
            slots.append(table[entry.request.row, position])
            wanted = entry.samples and position == entry.end - 1
            if wanted if scored_from is None else position >= scored_from:
                sampled.append(total)
            total += 1
        for place, node in enumerate(nodes):
            ids.append(trees.tokens_N[node])
            positions.append(entry.end - 1 + trees.depths_N[node])
            slots.append(entry.draft_slots[place])
            node_slots.append(entry.draft_slots[place])
            sampled.append(total)
            total += 1
    return ids, positions, slots, node_slots, sampled


def random_step(rng):
    entries, trees = [], []
    table = rng.permutation(8 * 40).reshape(8, 40).astype(np.int32)
    for row in rng.permutation(8)[: rng.integers(0, 8)].tolist():
        length = int(rng.integers(1, 30))
        request = make_request(rng.integers(0, 90, length).tolist(), request_id=row)
        request.row = row
        start = int(rng.integers(0, length))
        run_len = int(rng.integers(1, length - start + 1))
        slots = rng.integers(400, 500, int(rng.integers(0, 7))).astype(np.int32)
        entries.append(Scheduled(request=request, start=start, run_len=run_len, draft_slots=slots))
        most = len(slots) if entries[-1].samples else 0
        count = int(rng.integers(0, most + 1))
        parents = [int(rng.integers(0, node)) for node in range(1, count + 1)]
        trees.append((rng.integers(0, 90, count).tolist(), parents))
    return Batch(step=0, entries=entries), make_trees(trees), table


@pytest.mark.parametrize("seed", range(60))
def test_any_step_is_laid_out_as_entry_by_entry(seed) -> None:
    batch, trees, table = random_step(np.random.default_rng(seed))
    for scored_from in (None, 0, 5, 1000) if not trees.num_nodes else (None,):
        step = StepArrays.of(batch, trees, table, scored_from)
        ids, positions, slots, node_slots, sampled = entry_by_entry(
            batch, trees, table, scored_from
        )
        for array, expected in (
            (step.input_ids_T, ids), (step.positions_T, positions), (step.slots_T, slots),
            (step.sampled_R, sampled),
        ):  # fmt: skip
            assert array.dtype == np.int64
            assert array.tolist() == expected
        assert step.node_slots_N.tolist() == node_slots
        lens = [entry.run_len for entry in batch.entries] + np.diff(trees.offsets_B1)
        assert np.diff(step.q_offsets_B1).tolist() == lens.tolist()
        assert step.num_rows == len(ids)
        for array in (step.rows_B, step.starts_B, step.run_lens_B, step.q_offsets_B1,
                      step.node_offsets_B1, step.node_slots_N):  # fmt: skip
            assert array.dtype == np.int32
        assert step.longest == max((entry.end for entry in batch.entries), default=0)
