"""A batch's states as recurrent layers see them: who continues whom, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.ops.transfers import upload
from rollout.runner.step_states import state_inputs, state_plan
from rollout.types import Batch, Scheduled, ScheduledStates
from tests.helpers.requests import make_request, make_trees


def random_step(seed: int):
    """Runs and trees of some entries, each with states; targets are distinct."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 6))
    slots = iter((rng.permutation(400) + 1).tolist())
    entries, shapes = [], []
    for _ in range(count):
        start, run_len = int(rng.integers(0, 9)), int(rng.integers(1, 7))
        nodes = int(rng.integers(0, 8))
        reserved = nodes + int(rng.integers(0, 3))  # a budget verifies fewer
        run_end = next(slots)
        checkpoints = {start + n: next(slots) for n in range(1, run_len) if rng.random() < 0.3}
        if rng.random() < 0.3:
            checkpoints[start + run_len] = run_end
        entries.append(
            Scheduled(
                request=make_request(range(start + run_len)),
                start=start,
                run_len=run_len,
                draft_slots=np.arange(1, reserved + 1, dtype=np.int32),
                states=ScheduledStates(
                    source=next(slots) if start else 0,
                    run_end=run_end,
                    nodes=np.array([next(slots) for _ in range(reserved)], dtype=np.int32),
                    checkpoints=checkpoints,
                ),
            )
        )
        shapes.append(([5] * nodes, [int(rng.integers(0, j + 1)) for j in range(nodes)]))
    return Batch(step=0, entries=entries), make_trees(shapes)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("padding", [0, 3])
def test_every_row_continues_its_parent_and_ends_where_it_is_kept(seed, padding):
    batch, trees = random_step(seed)
    parents, targets, offsets = [], [], [0]
    for b, entry in enumerate(batch.entries):
        first, states = offsets[-1], entry.states
        kept = states.checkpoints | {entry.end: states.run_end}
        for n in range(entry.run_len):
            parents.append(first + n - 1 if n else -1)
            targets.append(kept.get(entry.start + n + 1, 0))
        root = first + entry.run_len - 1
        nodes = trees.parents_N[trees.offsets_B1[b] : trees.offsets_B1[b + 1]].tolist()
        parents += [root + parent for parent in nodes]
        targets += states.nodes[: len(nodes)].tolist()
        offsets.append(len(parents))
    rows = len(parents) + padding
    states = state_inputs(batch, trees, np.array(offsets, dtype=np.int32), rows)
    assert all(array.dtype == np.int32 for array in vars(states).values())
    assert states.parents_T.tolist() == parents + [-1] * padding
    assert states.targets_T.tolist() == targets + [0] * padding
    assert states.sources_B.tolist() == [entry.states.source for entry in batch.entries]


def test_padding_entries_begin_with_no_state():
    batch, trees = random_step(3)
    lengths = [entry.run_len for entry in batch.entries] + np.diff(trees.offsets_B1)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    padded = np.pad(offsets, (0, 2), mode="edge")
    states = state_inputs(batch, trees, padded, int(offsets[-1]) + 4)
    assert states.sources_B.tolist()[len(batch.entries) :] == [0, 0]
    plan = state_plan(torch.from_numpy(padded), upload(states, torch.device("cpu")))
    assert len(list(plan.rows())) == offsets[-1]
