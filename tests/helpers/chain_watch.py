"""Looks over a chain's shoulder: every row of every step is computed twice.

The second time there is no pool, no slot and no plan: whole sequences through dense attention,
each step on what the *second* computation of the step before gave, in a chain of one (EAGLE) on its
own. Of the drafter's own state only this is believed: which positions each step attends to. Whose
they are is checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from spec_workers.neural.drafter import NeuralDrafter
from tests.helpers.dense_attention import DenseAttention, features_of


@dataclass
class _Row:
    """The inputs that a position's keys and values were computed from."""

    position: int
    tokens: list[int]  # all it may depend on: the sequence up to the last token it was told
    input_E: torch.Tensor


@dataclass
class _Tree:
    """Nodes in the order they were run."""

    tokens: list[int] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)  # of the step that ran last


class ChainWatch:
    """Install on a drafter before the first step. Raises AssertionError from within a step."""

    def __init__(self, drafter: NeuralDrafter, *, tolerance: float = 3e-4) -> None:
        self.drafter = drafter
        self.target = drafter._target
        self.tolerance = tolerance
        steps = len(drafter.runners)
        self.known = [0] * steps  # rows compared
        self.nodes = [0] * steps
        self.holes: list[list[int]] = [[] for _ in range(steps)]  # positions passed over, by run
        self._rows: list[dict[int, _Row]] = [{} for _ in range(steps)]  # by slot
        # Of each request, by its list of tokens, and position: the step's output there.
        self._outputs: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in range(steps)]
        self._inputs: tuple[list[int], dict[str, int], torch.Tensor] = ([], {}, torch.empty(0))
        self._trees: dict[int, _Tree] = {}
        self._tokens_of: dict[int, list[int]] = {}
        self._propose, drafter.propose = drafter.propose, self.propose
        self._own = [(runner.extend, runner.run_nodes) for runner in drafter.runners]
        for step, runner in enumerate(drafter.runners):
            runner.extend = partial(self.extend, step)
            runner.run_nodes = lambda nodes, hidden, k=step: self.run_nodes(k, nodes, hidden)

    def poison(self) -> None:
        """Write NaN to all that no request may read: slots the target wrote since, and old trees'
        scratch."""
        for runner in self.drafter.runners:
            kv = runner.kv
            current = np.zeros(kv.pool.num_slots + 1, dtype=bool)
            current[: kv.first_private] = kv._is_current(np.arange(kv.first_private))
            for held in (row[:held] for row, held in zip(kv.table, kv.lens_Q, strict=True)):
                current[held[held >= kv.first_private]] = True
            unread = torch.from_numpy(np.flatnonzero(~current))
            for pool in kv.pool.keys + kv.pool.values:
                pool[unread] = float("nan")

    @torch.inference_mode()
    def propose(self, batch, floors_B, **options):
        self.poison()
        self._tokens_of = {entry.request.row: entry.request.tokens for entry in batch.entries}
        self._trees = {}
        trees = self._propose(batch, floors_B, **options)
        if trees.num_nodes:
            assert np.isfinite(trees.probs_N).all()
        return trees

    @torch.inference_mode()
    def extend(self, step, runs, hidden_TE, *, last_alone):
        if step == 0:
            self.poison()
        kv = self.drafter.runners[step].kv
        out_TE = self._own[step][0](runs, hidden_TE, last_alone=last_alone)
        assert runs.next_TK.shape[1] == step + 1
        first = given = 0
        for b, row in enumerate(runs.rows_B.tolist()):
            start, length = int(runs.starts_B[b]), int(runs.lens_B[b])
            if not length:
                continue
            of_request = runs.tokens_B[b]
            following = runs.next_TK[first : first + length]
            tokens = of_request[: start + 1] + following[0].tolist() + following[1:, -1].tolist()
            assert tokens[: len(of_request)] == of_request[: len(tokens)]
            for i in range(start, start + length):
                assert following[i - start].tolist() == tokens[i + 1 : i + 2 + step]
                input_E = self._input(step, of_request, tokens, i)
                slot = int(kv.table[row, kv.lens_Q[row] - length + i - start])
                self._rows[step][slot] = _Row(i, tokens[: i + 2 + step], input_E)
            attended = self._attended(step, row, start + length, tokens)
            assert [i for i, _ in attended][-length:] == list(range(start, start + length))
            self.holes[step].append(start + length - len(attended))
            wanted = self._dense(step, attended, [])[-length:]
            count = 1 if last_alone else length
            self._compare(out_TE[given : given + count], wanted[-count:])
            given += count
            for i in range(start, start + length):
                self._outputs[step][id(of_request), i] = wanted[i - start]
            first += length
            self.known[step] += length
        assert given == len(out_TE)
        return out_TE

    @torch.inference_mode()
    def run_nodes(self, step, nodes, hidden_TE):
        out_TE = self._own[step][1](nodes, hidden_TE)
        is_chain = len(self._own) > 1
        first = 0
        masks = np.split(nodes.masks_N, np.cumsum(nodes.counts_B)[:-1])
        for b, row in enumerate(nodes.rows_B.tolist()):
            count, new = int(nodes.counts_B[b]), int(nodes.new_B[b])
            assert new == count or not is_chain, "every step of a chain runs all nodes"
            rows, old = slice(first, first + new), count - new
            tree = self._trees.setdefault(int(nodes.bands_B[b]), _Tree())
            tokens, own = self._tokens_of[row], nodes.input_ids_T[rows].tolist()
            assert tree.tokens[old:] == own[: len(tree.tokens) - old], "the same nodes again"
            tree.tokens[old:] = own
            assert len(tree.tokens) == count
            paths = [
                [j for j in range(n + 1) if mask >> (j + 1) & 1]
                for n, mask in enumerate(masks[b].tolist())
            ]
            assert not is_chain or max(map(len, paths)) == step
            end = len(tokens) - 1 - step
            before, at = (step - 1, end) if is_chain else (0, end - 1)
            root, above = self._outputs[before][id(tokens), at], tree.outputs
            attended = self._attended(step, row, end, tokens)
            tree.outputs = [] if is_chain else above
            for n, path in enumerate(paths[old:]):
                assert nodes.positions_T[first + n] == end + len(path) - 1
                inputs = [root, *(above[j] for j in path[:-1])]
                below = [(end + d, tree.tokens[j], inputs[d]) for d, j in enumerate(path)]
                tree.outputs.append(self._dense(step, attended, below)[-1])
            self._compare(out_TE[rows], torch.stack(tree.outputs[old:]))
            self.nodes[step] += new
            first = rows.stop
        assert first == len(out_TE)
        return out_TE

    def _compare(self, given, wanted) -> None:
        torch.testing.assert_close(given, wanted, rtol=self.tolerance, atol=self.tolerance)

    def _input(self, step, of_request, tokens, position) -> torch.Tensor:
        if step:
            return self._outputs[step - 1][id(of_request), position]
        known, versions, inputs_TE = self._inputs
        now = dict(self.target.weights.versions)
        if now != versions or tokens[: len(known)] != known or position >= len(known):
            known = tokens[:-1]
            features_TF = features_of(self.target.model, self.drafter.features, known)
            inputs_TE = self.drafter.runners[0].model.fuse(features_TF)
            self._inputs = known, now, inputs_TE
        return inputs_TE[position]

    def _attended(self, step, row, end, tokens) -> list[tuple[int, _Row]]:
        """Positions below ``end`` in the step's own table, each checked to be of this sequence."""
        kv = self.drafter.runners[step].kv
        slots = self.target.memory.req_to_token.table[row, :end].tolist()
        found = []
        for slot in kv.table[row, : kv.lens_Q[row]].tolist():
            assert slot in self._rows[step], "a slot the step never wrote"
            noted = self._rows[step][slot]
            position = noted.position
            assert slot in (slots[position], *range(kv.first_private, kv.first_scratch))
            assert noted.tokens == tokens[: position + 2 + step], "another sequence's row"
            found.append((position, noted))
        assert [i for i, _ in found] == sorted({i for i, _ in found})
        return found

    def _dense(self, step, attended, below) -> torch.Tensor:
        """The step over positions attended to, then a path of (position, token, input)."""
        rows = [(i, noted.tokens[-1], noted.input_E) for i, noted in attended] + below
        positions, tokens, inputs = zip(*rows, strict=True)
        return self.drafter.runners[step].model.forward(
            torch.tensor(tokens),
            torch.stack(inputs),
            torch.tensor(positions),
            DenseAttention([len(rows)]),
        )
