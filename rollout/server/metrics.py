"""`GET /metrics`: the engine, the server, its calls and their samples, for Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from rollout.engine.metrics import EngineMetrics, EngineStatus

if TYPE_CHECKING:
    from rollout.server.serving import Serving
    from rollout.server.status import KnownStatus

_PREFIX = "specrollout_"

# Totals since the engine started. The accept length, tokens emitted per verify step, is
# generated_tokens / target_forwards; the accept rate of draft tokens is accepted / drafted.
_COUNTERS: dict[str, tuple[str, Callable[[EngineMetrics], float]]] = {
    "steps": ("Steps run", lambda m: m.steps),
    "target_forwards": ("Verify steps, one per request sampled", lambda m: m.target_forwards),
    "generated_tokens": ("Tokens emitted", lambda m: m.generated_tokens),
    "prompt_tokens": ("Prompt tokens of requests that ended", lambda m: m.prompt_tokens),
    "cached_prompt_tokens": ("Prompt tokens from the prefix cache", lambda m: m.cached_tokens),
    "proposed_tokens": ("Draft tokens proposed", lambda m: m.proposed),
    "drafted_tokens": ("Draft tokens verified", lambda m: m.drafted),
    "accepted_tokens": ("Draft tokens accepted", lambda m: m.accepted),
    "requests_finished": ("Requests that ended in a step", lambda m: m.finished),
    "preemptions": ("Requests preempted for lack of KV slots", lambda m: m.preemptions),
}
_PHASES: dict[str, Callable[[EngineMetrics], float]] = {
    "schedule": lambda m: m.schedule_ms,
    "draft": lambda m: m.draft_ms,
    "forward": lambda m: m.forward_ms,
    "sample": lambda m: m.sample_ms,
}
_GAUGES: dict[str, tuple[str, Callable[[EngineStatus], float]]] = {
    "requests_running": ("Requests in the batch", lambda s: s.running),
    "requests_waiting": ("Requests waiting", lambda s: s.waiting),
    "kv_slots": ("KV slots", lambda s: s.kv_slots),
    "kv_slots_used": ("KV slots of running requests", lambda s: s.kv_used),
    "kv_slots_cached": ("KV slots of the prefix cache alone", lambda s: s.kv_cached),
    "can_run": ("1: a step can run; 0: paused, asleep or torn", lambda s: not s.unavailable_reason),
    "saved_seconds": (
        "Seconds that drafts saved over plain decoding, summed over replicas",
        lambda s: s.total.saved_seconds,
    ),
    "saved_error_seconds": (
        "Half of the 95 % interval of saved_seconds; +Inf before it is measured",
        lambda s: s.total.saved_error_seconds,
    ),
}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text format. The engine's metrics are status_age_seconds old."""
        registry = CollectorRegistry(auto_describe=False)
        for collector in serving.http_metrics.collectors:
            registry.register(collector)
        registry.register(_Families(_of_server(serving)))
        registry.register(_Families(_of_engine(await serving.status_cache.latest())))
        ProcessCollector(registry=registry)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_server(serving: Serving) -> Iterator[Metric]:
    yield _gauge("requests_unfinished", "Samples submitted", serving.num_unfinished)
    yield _gauge("start_time_seconds", "When the server was made", serving.started)
    yield _gauge("draining", "1: new requests are refused", serving.is_draining)


def _of_engine(known: KnownStatus) -> Iterator[Metric]:
    status = known.status
    yield _gauge("status_age_seconds", "Age of the engine metrics", known.age)
    for name, (text, read) in _GAUGES.items():
        yield _gauge(name, text, read(status))
    for name, (text, count) in _COUNTERS.items():
        yield CounterMetricFamily(_PREFIX + name, text, value=count(status.total))
    yield _labelled(
        CounterMetricFamily, "step_seconds", "Time in steps", "phase", _phases(status.total)
    )
    yield _labelled(
        GaugeMetricFamily, "weight_version", "Of each part", "part", status.weight_versions
    )
    yield _labelled(GaugeMetricFamily, "worker", "Its own", "gauge", status.counters)
    yield from _corpora(status)
    for name, (text, read) in _GAUGES.items():
        of = {replica: read(own) for replica, own in status.replicas.items()}
        if of:
            yield _labelled(GaugeMetricFamily, f"replica_{name}", text, "replica", of)


def _phases(total: EngineMetrics) -> dict[str, float]:
    """Seconds; their sum is all the time that was spent in steps."""
    seconds = {phase: read(total) / 1e3 for phase, read in _PHASES.items()}
    return seconds | {"other": max(0.0, total.total_ms / 1e3 - sum(seconds.values()))}


def _corpora(status: EngineStatus) -> Iterator[Metric]:
    """Gauges of external corpora by state, not by name: names are clients'."""
    count: dict[str, float] = defaultdict(float)
    tokens, num_bytes = count.copy(), count.copy()
    for corpus in status.corpora:
        count[corpus.state.value] += 1
        tokens[corpus.state.value] += corpus.num_tokens
        num_bytes[corpus.state.value] += corpus.num_bytes
    for name, text, values in (
        ("corpora", "External corpora", count),
        ("corpora_tokens", "Tokens of external corpora", tokens),
        ("corpora_bytes", "Bytes of external corpora", num_bytes),
    ):
        yield _labelled(GaugeMetricFamily, name, text, "state", values)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=float(value))


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    found = family(_PREFIX + name, text, labels=[label])
    for key, value in values.items():
        found.add_metric([key], float(value))
    return found
