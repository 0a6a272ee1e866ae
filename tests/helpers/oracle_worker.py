"""A worker that drafts from known rollouts: right, wrong and branching trees at will."""

from __future__ import annotations

import numpy as np

from rollout.config import EngineConfig
from rollout.types import Batch, DraftTrees
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker
from tests.helpers.requests import make_trees
from tests.helpers.tree_checks import check_trees


class OracleWorker(SpecWorker):
    """Drafts trees of up to ``size`` nodes in which ``right`` of the nodes go on as recorded.

    ``recorded``: (prompt_index, sample_index) -> all tokens of that rollout, prompt included.
    """

    def __init__(
        self, target: TargetWorker, recorded: dict, *, size: int, right: float, chain: bool, seed=0
    ) -> None:
        super().__init__(target)
        self._rollouts = recorded
        self._size = size
        self._right = right
        self._chain = chain
        self._rng = np.random.default_rng(seed)

    @property
    def max_draft_tokens(self) -> int:
        return self._size

    def propose(self, batch: Batch, floors_B: np.ndarray) -> DraftTrees:
        trees = make_trees([self._tree(entry) if entry.samples else ([], [])
                            for entry in batch.entries])  # fmt: skip
        check_trees(trees)
        return trees

    def _tree(self, entry) -> tuple[list[int], list[int]]:
        rng, request = self._rng, entry.request
        truth = self._rollouts[request.prompt_index, request.sample_index]
        truth = truth[len(request.tokens) :]
        size = int(rng.integers(0, min(self._size, len(entry.draft_slots)) + 1))
        tokens: list[int] = []
        parents: list[int] = []
        on_truth = {0: 0}  # tree node -> how many recorded tokens its path has matched
        for node in range(1, size + 1):
            parent = node - 1 if self._chain else int(rng.integers(max(0, node - 4), node))
            matched = on_truth.get(parent)
            if matched is not None and matched < len(truth) and rng.random() < self._right:
                tokens.append(truth[matched])
                on_truth[node] = matched + 1
            else:
                tokens.append(int(rng.integers(0, self.vocab_size)))
            parents.append(parent)
        return tokens, parents


def oracle_factory(recorded: dict, capture=None, **options):
    """``capture``: as of TargetWorker."""

    def build(config: EngineConfig, progress=None) -> OracleWorker:
        return OracleWorker(TargetWorker(config, progress, capture=capture), recorded, **options)

    return build
