"""The latest report of every replica, and the sums that look like one engine's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from rollout.cluster.messages import ClusterMetrics, Report
from rollout.cluster.replica import Replica
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.engine.draft_corpus import ExternalCorpus
from rollout.engine.metrics import EngineStatus, StepMetrics


class ReplicaReports:
    """The latest of each replica, and the sums over all of them."""

    def __init__(self, replicas: ReplicaManager) -> None:
        self.statuses: dict[str, EngineStatus] = {}
        """Latest status by name, of dead replicas too: their replacements are given what they
        had."""
        self._replicas = replicas
        self._reports: dict[str, Report] = {}  # of each that lives
        self._past = ClusterMetrics()  # of lives that ended
        self._num_reports = 0
        self._serial = 0  # of the latest `sync`

    def note(self, name: str, report: Report) -> None:
        self._num_reports += 1
        self._reports[name] = report
        if report.status is not None:
            self.statuses[name] = report.status

    def note_death(self, name: str) -> None:
        report = self._reports.pop(name, None)
        if report is not None:
            buried = replace(report.total, kv_slots=0, memory_bytes=0)
            self._past = sum_of_metrics([self._past, buried])

    def sync(self) -> None:
        """Return when all that replicas have done so far is known here."""
        self._serial += 1
        waiting = dict(self._replicas.joined)
        for replica in waiting.values():
            replica.sync(self._serial)
        while any(self._is_behind(replica) for replica in waiting.values()):
            self._replicas.poll(WAIT_SECONDS)

    def metrics(self) -> ClusterMetrics:
        """The metrics of all replicas, including those that died."""
        return sum_of_metrics([self._past, *(each.total for each in self._reports.values())])

    @property
    def last_step(self) -> StepMetrics:
        """The latest of each replica, added up. ``step`` counts the reports that came."""
        return sum_of_steps(self._num_reports, [each.last_step for each in self._reports.values()])

    @property
    def corpus_tokens(self) -> int | None:
        """Tokens in the corpus of the replica that has most."""
        known = [each.corpus_tokens for each in self.statuses.values()]
        return max((tokens for tokens in known if tokens is not None), default=None)

    def status(
        self,
        *,
        waiting: int,
        unavailable_reason: str,
        weight_versions: Mapping[str, int],
        corpora: Iterable[ExternalCorpus],
    ) -> EngineStatus:
        """The sums of the replicas' statuses, with what the cluster alone knows."""
        known = self.statuses
        some = next(iter(known.values()))
        return EngineStatus(
            running=sum(each.running for each in known.values()),
            waiting=sum(each.waiting for each in known.values()) + waiting,
            kv_slots=sum(each.kv_slots for each in known.values()),
            kv_used=sum(each.kv_used for each in known.values()),
            kv_cached=sum(each.kv_cached for each in known.values()),
            unavailable_reason=unavailable_reason,
            weight_versions=weight_versions,
            total=self.metrics(),
            last_step=self.last_step,
            counters=some.counters,
            learned=some.learned,
            corpora=tuple(corpora),
            corpus_tokens=self.corpus_tokens,
            replicas=dict(known),
        )

    def _is_behind(self, replica: Replica) -> bool:
        if self._replicas.joined.get(replica.name) is not replica:
            return False  # it died
        report = self._reports.get(replica.name)
        return report is None or report.serial < self._serial


def sum_of_metrics(each: Iterable[ClusterMetrics]) -> ClusterMetrics:
    """Counters and times added up; the first rollout is the first of any."""
    total = ClusterMetrics()
    firsts = []
    for metrics in each:
        for name in _COUNTERS:
            setattr(total, name, getattr(total, name) + getattr(metrics, name))
        if metrics.first_rollout_seconds is not None:
            firsts.append(metrics.first_rollout_seconds)
    total.first_rollout_seconds = min(firsts, default=None)
    return total


def sum_of_steps(step: int, each: Iterable[StepMetrics]) -> StepMetrics:
    """One step out of each replica's: counts are summed, times and versions are the largest, since
    replicas step side by side."""
    total = StepMetrics(step=step)
    for metrics in each:
        for name in _STEP_COUNTS:
            setattr(total, name, getattr(total, name) + getattr(metrics, name))
        for name in _STEP_LARGEST:
            setattr(total, name, max(getattr(total, name), getattr(metrics, name)))
    return total


_COUNTERS = [
    field.name for field in fields(ClusterMetrics) if field.name != "first_rollout_seconds"
]
_STEP_LARGEST = [
    field.name
    for field in fields(StepMetrics)
    if field.name == "weight_version" or field.name.endswith("_ms")
]
_STEP_COUNTS = [
    field.name for field in fields(StepMetrics) if field.name not in ("step", *_STEP_LARGEST)
]
