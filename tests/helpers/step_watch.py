"""Counts what steps came to: chunks, draft trees that branched, steps beside one another."""

from __future__ import annotations

from rollout import RolloutEngine
from spec_workers.observation import Observation


class StepWatch:
    """Installed on an engine's worker before the first step."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.chunks = 0  # runs that ended within a prompt
        self.branched = 0  # trees in which a node had siblings
        self.later_children = 0  # accepted nodes before which a sibling was verified
        self.drafted = 0
        self.accepted = 0
        self.overlapped = 0  # steps that ended with another one under way
        self._engine = engine
        self._observe = engine.worker.observe
        engine.worker.observe = self.observe

    def observe(self, step: Observation) -> None:
        offsets = step.trees.offsets_B1.tolist()
        for b, (entry, result) in enumerate(zip(step.batch.entries, step.results, strict=True)):
            parents = step.trees.parents_N[offsets[b] : offsets[b + 1]].tolist()
            self.chunks += not entry.samples
            self.branched += len(set(parents)) < len(parents)
            self.drafted += len(parents)
            self.accepted += len(result.path)
            self.later_children += sum(
                parents[node - 1] in parents[: node - 1] for node in result.path
            )
        self.overlapped += bool(self._engine.steps._under_way)
        self._observe(step)
