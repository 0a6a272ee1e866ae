"""Counts what becomes of draft trees: whether they branched, and which child was accepted."""

from __future__ import annotations

from rollout import RolloutEngine
from spec_workers.observation import Observation


class BranchWatch:
    """Installed on an engine's worker before the first step."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.branched = 0  # trees in which a node had siblings
        self.later_children = 0  # accepted nodes before which a sibling was verified
        self._observe = engine.worker.observe
        engine.worker.observe = self.observe

    def observe(self, step: Observation) -> None:
        offsets = step.trees.offsets_B1.tolist()
        for b, result in enumerate(step.results):
            parents = step.trees.parents_N[offsets[b] : offsets[b + 1]].tolist()
            self.branched += len(set(parents)) < len(parents)
            self.later_children += sum(
                parents[node - 1] in parents[: node - 1] for node in result.path
            )
        self._observe(step)
