"""A neural draft's stand-in that knows the rollouts: right as often as it is told to be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.types import Batch, DraftTrees, Request
from spec_workers.step.observation import Observation
from tests.helpers.requests import make_trees

VOCAB = 97


class OracleDrafter:
    """See `Drafter`. Chains of ``depth`` recorded tokens, each with a wrong sibling."""

    sources = ("oracle",)
    features = AuxHiddenStates()
    lockstep = False
    is_warm = True

    def __init__(
        self, recorded: Mapping[tuple[int, int], Sequence[int]], *, depth: int, right: float
    ) -> None:
        """``recorded``: (prompt_index, sample_index) -> all tokens of that rollout, prompt too."""
        self._recorded = recorded
        self._depth = depth
        self._right = right
        self._rng = np.random.default_rng(0)
        self.max_draft_tokens = 2 * depth
        self.asked: list[int] = []  # requests, each time they were asked about
        self.num_observed = 0
        self.num_released = 0

    def propose(
        self,
        batch: Batch,
        floors_B: np.ndarray,
        entries: Collection[int] | None = None,
        token_ms_B: np.ndarray | None = None,
    ) -> DraftTrees:
        shapes, probs = [], []
        for b, entry in enumerate(batch.entries):
            wanted = entry.samples and (entries is None or b in entries)
            tokens, parents = (
                self._tree(entry.request, len(entry.draft_slots)) if wanted else ([], [])
            )
            if wanted:
                self.asked.append(entry.request.request_id)
            # Nodes come in pairs, the likelier first; below that one the next pair.
            joint = [0.8 ** (j // 2) * (0.8, 0.1)[j % 2] for j in range(len(tokens))]
            order = sorted(range(len(tokens)), key=lambda j: -joint[j])
            number = {0: 0} | {j + 1: rank for rank, j in enumerate(order, start=1)}
            shapes.append(([tokens[j] for j in order], [number[parents[j]] for j in order]))
            probs += [joint[j] for j in order]
        trees = make_trees(shapes)
        trees.probs_N = np.array(probs, dtype=np.float32)
        return trees

    def _tree(self, request: Request, room: int) -> tuple[list[int], list[int]]:
        truth = self._recorded[request.prompt_index, request.sample_index][len(request.tokens) :]
        tokens: list[int] = []
        parents: list[int] = []
        parent = 0
        for token in truth[: min(self._depth, room // 2)]:
            wrong = (token + 1) % VOCAB
            first, second = (token, wrong) if self._rng.random() < self._right else (wrong, token)
            tokens += [first, second]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return tokens, parents

    def observe(self, step: Observation, *, prompts_alone: bool = False) -> None:
        self.num_observed += not prompts_alone

    def release(self, request: Request) -> None:
        self.num_released += 1

    def weights_changed(self) -> None: ...

    def check_integrity(self, running: Iterable[Request]) -> None: ...

    def counters(self) -> dict[str, float]:
        return {"draft/asked": len(self.asked)}
