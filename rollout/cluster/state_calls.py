"""The cluster's calls that look at it, and those that say whether it may run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from rollout.cluster.external_corpora import ExternalCorpora
from rollout.cluster.messages import Report
from rollout.cluster.replica import Replica
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.cluster.replica_weight_sync import ReplicaWeightSync
from rollout.cluster.router import Router
from rollout.cluster.totals import ClusterMetrics, sum_of_metrics, sum_of_steps
from rollout.engine.metrics import StepMetrics
from rollout.engine.status import EngineStatus
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.types import MemoryTag, PauseMode


class ClusterStateCalls(ABC):
    """A part of RolloutCluster."""

    members: ReplicaManager
    weight_bringer: ReplicaWeightSync
    _externals: ExternalCorpora
    _router: Router
    _num_steps: int
    _reports: dict[str, Report]  # of each replica that lives, the latest
    _statuses: dict[str, EngineStatus]  # by name, the latest, of dead ones too
    _past: ClusterMetrics  # of lives that ended
    is_paused: bool
    _released: dict[MemoryTag, bool]  # whether its values are kept
    _serial: int

    def status(self) -> EngineStatus:
        """The replicas' latest, a second old at most, and their sums."""
        self.members.poll(0.0)
        known = self._statuses
        some = next(iter(known.values()))
        return EngineStatus(
            running=sum(each.running for each in known.values()),
            waiting=sum(each.waiting for each in known.values()) + self._router.num_waiting,
            kv_slots=sum(each.kv_slots for each in known.values()),
            kv_used=sum(each.kv_used for each in known.values()),
            kv_cached=sum(each.kv_cached for each in known.values()),
            unavailable_reason=self.unavailable_reason,
            weight_versions=self.weight_versions,
            total=self.metrics(),
            last_step=self.last_step,
            counters=some.counters,
            learned=some.learned,
            corpora=tuple(self._externals.known({n: each.corpora for n, each in known.items()})),
            corpus_tokens=self.corpus_tokens,
            replicas=dict(known),
        )

    @property
    def corpus_tokens(self) -> int | None:
        """Tokens in the corpus of the replica that has most."""
        known = [each.corpus_tokens for each in self._statuses.values()]
        return max((tokens for tokens in known if tokens is not None), default=None)

    def metrics(self) -> ClusterMetrics:
        """The metrics of all replicas, including those that died."""
        return sum_of_metrics([self._past, *(each.total for each in self._reports.values())])

    @property
    def last_step(self) -> StepMetrics:
        """The latest of each replica, added up. ``step`` counts the reports that came."""
        return sum_of_steps(self._num_steps, [each.last_step for each in self._reports.values()])

    @property
    @abstractmethod
    def weight_versions(self) -> dict[str, int]: ...

    @property
    def unavailable_reason(self) -> str:
        if self.is_paused:
            return "generation is paused: call continue_generation()"
        if lost := self._weights_unavailable_reason():
            return lost
        return next(
            (
                each.unavailable_reason
                for each in self.members.joined.values()
                if each.unavailable_reason
            ),
            "",
        )

    @property
    def can_run(self) -> bool:
        return not self.unavailable_reason

    def _require_running(self) -> None:
        """Raises EngineStateError without memory, WeightUpdateError while weights are not whole."""
        if unavailable_reason := self.unavailable_reason:
            raise (EngineStateError if self._released else WeightUpdateError)(unavailable_reason)

    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        self.members.on_all("pause_generation", mode, newcomers=True)
        self.is_paused = True
        if mode == PauseMode.ABORT:
            self._abort_all()
        else:
            self.sync()

    def continue_generation(self) -> None:
        self.is_paused = False
        self.members.on_all("continue_generation", newcomers=True)

    @property
    def released_tags(self) -> frozenset[MemoryTag]:
        return frozenset(self._released)

    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]:
        """Bytes by tag, of all replicas together. Where one fails, the others take theirs back."""
        freed: dict[str, int] = {}
        tags = list(tags)
        answers = self.members.on_all(
            "release_memory",
            tags,
            keep_weights,
            newcomers=True,
            undo=lambda each: each.call("resume_memory", tags),
        )
        for each in answers.values():
            for tag, num_bytes in each.items():
                freed[tag] = freed.get(tag, 0) + num_bytes
        self._released |= dict.fromkeys(map(MemoryTag, tags), keep_weights)
        return freed

    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None:
        wanted = list(self._released if tags is None else tags)
        self.members.on_all("resume_memory", wanted, newcomers=True)
        for tag in wanted:
            self._released.pop(MemoryTag(tag), None)
        self.weight_bringer.try_again()

    def flush_cache(self) -> None:
        self.members.on_all("flush_cache")

    def check_integrity(self) -> None:
        self.members.on_all("check_integrity")

    def sync(self) -> None:
        """Return when all that replicas have done so far is known here."""
        self._serial += 1
        waiting = dict(self.members.joined)
        for replica in waiting.values():
            replica.sync(self._serial)
        while any(self._is_behind(replica) for replica in waiting.values()):
            self.members.poll(WAIT_SECONDS)

    def _is_behind(self, replica: Replica) -> bool:
        if self.members.joined.get(replica.name) is not replica:
            return False  # it died
        report = self._reports.get(replica.name)
        return report is None or report.serial < self._serial

    def _bring_state(self, replica: Replica) -> Future[Any]:
        """A joiner: paused and asleep as the others are."""
        if self.is_paused:
            replica.call("pause_generation", PauseMode.IN_PLACE)
        for keeps in (True, False):
            tags = [tag for tag, kept in self._released.items() if kept is keeps]
            if tags:
                replica.call("release_memory", tags, keeps)
        noted: Future[None] = Future()

        def note(answer: Future[Any]) -> None:
            if (error := answer.exception()) is not None:
                noted.set_exception(error)
                return
            self._statuses[replica.name] = answer.result()
            noted.set_result(None)

        replica.call("status").add_done_callback(note)
        return noted

    @abstractmethod
    def _weights_unavailable_reason(self) -> str: ...

    @abstractmethod
    def _abort_all(self) -> None: ...
