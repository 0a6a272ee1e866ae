"""Pauses and sleep of all replicas together, and of those that join later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from rollout.cluster.replica import Replica, then
from rollout.cluster.replica_manager import ReplicaManager
from rollout.cluster.reports import ReplicaReports
from rollout.engine.engine import RolloutEngine
from rollout.types import MemoryTag, PauseMode


class ClusterLifecycle:
    """Pause and sleep of all replicas. `Lifecycle` documents the calls.

    Args:
        abort_all: ends every request of the cluster with the tokens there are.
    """

    def __init__(
        self, replicas: ReplicaManager, reports: ReplicaReports, abort_all: Callable[[], None]
    ) -> None:
        self.is_paused = False
        self._replicas = replicas
        self._reports = reports
        self._abort_all = abort_all
        self._released: dict[MemoryTag, bool] = {}  # whether its values are kept
        replicas.on_join(self._bring)

    @property
    def unavailable_reason(self) -> str:
        """Why no step can run now, by the cluster's own pause or by what a replica says."""
        if self.is_paused:
            return "generation is paused: call continue_generation()"
        reasons = [each.unavailable_reason for each in self._replicas.joined.values()]
        return next((reason for reason in reasons if reason), "")

    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Pause all replicas, and those that start meanwhile."""
        self._replicas.on_all(RolloutEngine.pause_generation, mode, newcomers=True)
        self.is_paused = True
        if mode == PauseMode.ABORT:
            self._abort_all()
        else:
            self._reports.sync()

    def continue_generation(self) -> None:
        self.is_paused = False
        self._replicas.on_all(RolloutEngine.continue_generation, newcomers=True)

    @property
    def released_tags(self) -> frozenset[MemoryTag]:
        return frozenset(self._released)

    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]:
        """Bytes by tag, of all replicas together. Where one fails, the others take theirs back."""
        freed: dict[str, int] = {}
        tags = list(tags)
        answers = self._replicas.on_all(
            RolloutEngine.release_memory,
            tags,
            keep_weights,
            newcomers=True,
            undo=lambda each: each.call(RolloutEngine.resume_memory, tags),
        )
        for each in answers.values():
            for tag, num_bytes in each.items():
                freed[tag] = freed.get(tag, 0) + num_bytes
        self._released |= dict.fromkeys(map(MemoryTag, tags), keep_weights)
        return freed

    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None:
        wanted = list(self._released if tags is None else tags)
        self._replicas.on_all(RolloutEngine.resume_memory, wanted, newcomers=True)
        for tag in wanted:
            self._released.pop(MemoryTag(tag), None)

    def _bring(self, replica: Replica) -> Future[Any]:
        """A joiner: paused and asleep as the others are."""
        if self.is_paused:
            replica.call(RolloutEngine.pause_generation, PauseMode.IN_PLACE)
        for keep_weights in (True, False):
            tags = [tag for tag, keeps in self._released.items() if keeps is keep_weights]
            if tags:
                replica.call(RolloutEngine.release_memory, tags, keep_weights)

        def note(answer: Future[Any]) -> None:
            self._reports.statuses[replica.name] = answer.result()

        return then(replica.call(RolloutEngine.status), note)
