"""Looks over the shoulder of a draft of one network: every row it runs is computed a second time.

The second time there is no pool, no slot, no plan and no step: whole sequences through the dense
attention, the target's hidden states of all of them included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from spec_workers.neural.drafter import NeuralDrafter
from tests.helpers.dense_attention import DenseAttention, features_of


@dataclass
class _Tree:
    """Nodes of one tree in the order they were run, with the reference's hidden states."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)


class DraftWatch:
    """Install on a drafter before the first step. Raises AssertionError from within a step."""

    def __init__(self, drafter: NeuralDrafter, *, tolerance: float = 2e-4) -> None:
        (self.runner,) = drafter.runners
        self.model, self.kv = self.runner.model, self.runner.kv
        self.memory = drafter._target.memory
        self.target = drafter._target.model
        self.tolerance = tolerance
        self.known = self.nodes = 0  # rows run; what is not given of them shows in those after it
        self.holes: list[int] = []  # positions passed over, of each run
        # Request (by its list of tokens), length -> reference at the last position but one.
        self._roots: dict[tuple[int, int], torch.Tensor] = {}
        self._tokens: dict[int, list[int]] = {}
        self._fused_of: tuple[tuple[int, ...], torch.Tensor] = ((), torch.empty(0))
        self._trees: dict[int, _Tree] = {}
        self._extend, self._run_nodes = self.runner.extend, self.runner.run_nodes
        self._propose = drafter.propose
        self.runner.extend, self.runner.run_nodes = self.extend, self.run_nodes
        drafter.propose = self.propose

    def poison(self) -> None:
        """Write NaN to all that no request may read: slots the target wrote since, and old
        trees."""
        current = np.zeros(self.kv.pool.num_slots + 1, dtype=bool)
        current[: self.kv.first_scratch] = self.kv._is_current(np.arange(self.kv.first_scratch))
        unread = torch.from_numpy(np.flatnonzero(~current))
        for pool in self.kv.pool.keys + self.kv.pool.values:
            pool[unread] = float("nan")

    def propose(self, batch, floors_B, **options):
        self.poison()
        self._tokens = {entry.request.row: entry.request.tokens for entry in batch.entries}
        self._trees = {}
        return self._propose(batch, floors_B, **options)

    def extend(self, runs, hidden_TE, *, last_alone):
        self.poison()
        out_TE = self._extend(runs, hidden_TE, last_alone=last_alone)
        first = given = 0
        for b, row in enumerate(runs.rows_B.tolist()):
            start, length = int(runs.starts_B[b]), int(runs.lens_B[b])
            if not length:
                continue
            following = runs.next_TK[first : first + length, -1].tolist()
            tokens = runs.tokens_B[b][: start + 1] + following
            attended = self._attended(row, start + length)
            assert attended[-length:] == list(range(start, start + length))
            self.holes.append(start + length - len(attended))
            wanted_AE = self._known_rows(tokens, attended)
            count = 1 if last_alone else length
            self._compare(out_TE[given : given + count], wanted_AE[-count:])
            given += count
            self._roots[id(runs.tokens_B[b]), len(tokens)] = wanted_AE[-1]
            first += length
            self.known += length
        assert given == len(out_TE)
        return out_TE

    def run_nodes(self, nodes, hidden_TE):
        out_TE = self._run_nodes(nodes, hidden_TE)
        row_of_query = 0
        masks = np.split(nodes.masks_N, np.cumsum(nodes.counts_B)[:-1])
        for b, row in enumerate(nodes.rows_B.tolist()):
            tree = self._trees.setdefault(int(nodes.bands_B[b]), _Tree())
            new = slice(row_of_query, row_of_query + int(nodes.new_B[b]))
            tree.tokens += nodes.input_ids_T[new].tolist()
            tree.positions += nodes.positions_T[new].tolist()
            tree.masks = masks[b].tolist()
            assert len(tree.tokens) == len(tree.masks) == nodes.counts_B[b]
            tokens = self._tokens[row]
            attended = self._attended(row, len(tokens) - 1)
            for query in range(row_of_query, new.stop):
                index = len(tree.hidden)
                path = [j for j in range(index + 1) if tree.masks[index] >> (j + 1) & 1]
                assert path[-1] == index
                assert tree.positions[index] == len(tokens) + len(path) - 2
                wanted_E = self._node(
                    tokens, attended, self._roots[id(tokens), len(tokens)], tree, path
                )
                self._compare(out_TE[query], wanted_E)
                tree.hidden.append(wanted_E)
                self.nodes += 1
            row_of_query = new.stop
        assert row_of_query == len(out_TE)
        return out_TE

    def _compare(self, given: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(given, wanted, rtol=self.tolerance, atol=self.tolerance)

    def _attended(self, row: int, end: int) -> list[int]:
        """Positions of the slots in the draft's row, from the target's."""
        slots = self.memory.req_to_token.table[row, :end].tolist()
        held = self.kv.table[row, : self.kv.lens_Q[row]].tolist()
        return [slots.index(slot) for slot in held]

    def _known_inputs(self, tokens, attended):
        """(next tokens, fused features, positions) of the positions attended to."""
        sequence = tuple(tokens[: attended[-1] + 1])
        if sequence != self._fused_of[0]:
            found_TF = features_of(self.target, self.model.spec.features, sequence)
            self._fused_of = (sequence, self.model.fuse(found_TF))
        positions = torch.tensor(attended)
        return torch.tensor(tokens)[positions + 1], self._fused_of[1][positions], positions

    def _known_rows(self, tokens, attended) -> torch.Tensor:
        next_ids, fused, positions = self._known_inputs(tokens, attended)
        return self.model.forward(next_ids, fused, positions, DenseAttention([len(attended)]))

    def _node(self, tokens, attended, root_E, tree: _Tree, path: list[int]) -> torch.Tensor:
        next_ids, fused, positions = self._known_inputs(tokens, attended)
        above = [root_E, *(tree.hidden[j] for j in path[:-1])]
        return self.model.forward(
            torch.cat([next_ids, torch.tensor([tree.tokens[j] for j in path])]),
            torch.cat([fused, torch.stack(above)]),
            torch.cat([positions, torch.tensor([tree.positions[j] for j in path])]),
            DenseAttention([len(attended) + len(path)]),
        )[-1]
