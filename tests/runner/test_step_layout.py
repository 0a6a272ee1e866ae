"""A step laid out at once is the step laid out entry by entry, recurrent states included."""

from __future__ import annotations

import numpy as np
import torch

from rollout.ops.transfers import upload
from rollout.runner.batch_layout import StepArrays
from rollout.runner.step_states import state_inputs, state_plan
from rollout.types import Batch, Scheduled, ScheduledStates
from tests.helpers.requests import make_request, make_trees


def random_step(seed: int):
    """Runs and trees of some entries; slots and states are distinct."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(8 * 40).reshape(8, 40).astype(np.int32)
    states = iter((rng.permutation(400) + 1).tolist())
    entries, shapes = [], []
    longest_run = 2 if seed % 4 == 0 else 9
    for row in rng.permutation(8)[: rng.integers(0, 8)].tolist():
        length = int(rng.integers(1, 30))
        request = make_request(rng.integers(0, 90, length).tolist(), request_id=row)
        request.row = row
        start = max(0, length - int(rng.integers(1, longest_run)))
        run_len = int(rng.integers(1, length - start + 1))
        reserved = int(rng.integers(0, 7))
        end, run_end = start + run_len, next(states)
        checkpoints = {n: next(states) for n in range(start + 1, end) if rng.random() < 0.3}
        if rng.random() < 0.3:
            checkpoints[end] = run_end
        entries.append(
            Scheduled(
                request=request,
                start=start,
                run_len=run_len,
                draft_slots=rng.integers(400, 500, reserved).astype(np.int32),
                states=ScheduledStates(
                    source=next(states) if start else 0,
                    run_end=run_end,
                    nodes=np.array([next(states) for _ in range(reserved)], dtype=np.int32),
                    checkpoints=checkpoints,
                ),
            )
        )
        count = int(rng.integers(0, reserved + 1)) if entries[-1].samples else 0
        parents = [int(rng.integers(0, node)) for node in range(1, count + 1)]
        shapes.append((rng.integers(0, 90, count).tolist(), parents))
    return Batch(step=0, entries=entries), make_trees(shapes), table


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


def test_any_step_is_laid_out_as_entry_by_entry() -> None:
    for seed in range(120):
        batch, trees, table = random_step(seed)
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
                assert array.tolist() == expected, seed
            assert step.node_slots_N.tolist() == node_slots, seed
            lens = [entry.run_len for entry in batch.entries] + np.diff(trees.offsets_B1)
            assert np.diff(step.q_offsets_B1).tolist() == lens.tolist(), seed
            assert step.num_rows == len(ids)
            for array in (step.rows_B, step.starts_B, step.run_lens_B, step.q_offsets_B1,
                          step.node_offsets_B1, step.node_slots_N):  # fmt: skip
                assert array.dtype == np.int32


def test_every_row_continues_its_parents_state_and_ends_where_it_is_kept() -> None:
    for seed in range(60):
        batch, trees, _ = random_step(seed)
        padding = seed % 3
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
        offsets_B1 = np.array(offsets + offsets[-1:] * padding, dtype=np.int32)
        states = state_inputs(batch, trees, offsets_B1, rows)
        assert all(array.dtype == np.int32 for array in vars(states).values())
        assert states.parents_T.tolist() == parents + [-1] * padding, seed
        assert states.targets_T.tolist() == targets + [0] * padding, seed
        sources = [entry.states.source for entry in batch.entries]
        assert states.sources_B.tolist() == sources + [0] * padding, seed
        plan = state_plan(torch.from_numpy(offsets_B1), upload(states, torch.device("cpu")))
        assert len(list(plan.rows())) == len(parents), seed
