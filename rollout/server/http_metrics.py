"""Counters and times of HTTP requests and their samples."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.types import Rollout

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TOKENS = tuple(2**exponent for exponent in range(0, 18, 2))
_RECENT = 200  # samples


@dataclass(frozen=True, slots=True)
class Latency:
    """Medians of recent samples in seconds; None before there are any."""

    first_token_seconds: float | None  # from submission
    token_seconds: float | None  # per token after the first


class HttpMetrics:
    """The HTTP metrics of one server. Labels are bounded: clients choose none of their values."""

    def __init__(self) -> None:
        disable_created_metrics()  # they double the number of series
        labels = ("method", "route", "status")
        self.requests = Counter(
            "specrollout_http_requests", "HTTP requests answered", labels, registry=None
        )
        self.in_flight = Gauge(
            "specrollout_http_requests_in_flight", "HTTP requests being answered", registry=None
        )
        self.seconds = Histogram(
            "specrollout_http_request_seconds",
            "From an HTTP request to the end of its answer",
            ("method", "route"),
            buckets=_SECONDS,
            registry=None,
        )
        self.samples = Counter(
            "specrollout_samples",
            "Samples by how they ended; cancelled: the client left",
            ("outcome",),
            registry=None,
        )
        self.sample_seconds = Histogram(
            "specrollout_sample_seconds",
            "From a sample's submission to its end",
            buckets=_SECONDS,
            registry=None,
        )
        self.sample_tokens = Histogram(
            "specrollout_sample_tokens", "Tokens of a sample", buckets=_TOKENS, registry=None
        )
        self.first_token_seconds = Histogram(
            "specrollout_time_to_first_token_seconds",
            "From a sample's submission to its first token",
            buckets=_SECONDS,
            registry=None,
        )
        self.token_seconds = Histogram(
            "specrollout_time_per_output_token_seconds",
            "From a sample's first token to its end, per token after the first",
            buckets=_TOKEN_SECONDS,
            registry=None,
        )
        self._first_token_seconds: deque[float] = deque(maxlen=_RECENT)
        self._token_seconds: deque[float] = deque(maxlen=_RECENT)

    @property
    def collectors(self) -> Iterator[Collector]:
        """Every metric, for a registry."""
        return (each for each in vars(self).values() if not isinstance(each, deque))

    @property
    def latency(self) -> Latency:
        return Latency(_median(self._first_token_seconds), _median(self._token_seconds))

    def watch(self, future: Future[Rollout]) -> None:
        """Count a sample when it ends, on any thread."""
        started = time.monotonic()

        def count(ended: Future[Rollout]) -> None:
            if ended.cancelled():
                self.samples.labels("cancelled").inc()
            elif ended.exception() is not None:
                self.samples.labels("refused").inc()
            else:
                rollout = ended.result()
                self.samples.labels(rollout.finish_reason.value).inc()
                seconds, tokens = time.monotonic() - started, len(rollout.token_ids)
                self.sample_seconds.observe(seconds)
                self.sample_tokens.observe(tokens)
                self._observe_latency(seconds, tokens, rollout.stats.first_token_seconds)

        future.add_done_callback(count)

    def _observe_latency(self, seconds: float, tokens: int, first_token: float | None) -> None:
        if first_token is None:
            return
        self.first_token_seconds.observe(first_token)
        self._first_token_seconds.append(first_token)
        if tokens > 1:
            per_token = max(seconds - first_token, 0.0) / (tokens - 1)
            self.token_seconds.observe(per_token)
            self._token_seconds.append(per_token)


def _median(seconds: deque[float]) -> float | None:
    known = list(seconds)
    return median(known) if known else None


class CountRequests:
    """Outermost ASGI middleware, so that answers of the others are counted too."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, started = self._metrics, time.monotonic()
        status = 500  # an app that raises has answered nothing, or not to the end

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with metrics.in_flight.track_inprogress():
            try:
                await self._app(scope, receive, watched)
            finally:
                method = scope["method"] if scope["method"] in _METHODS else "other"
                # The route's template; none for unknown paths and for answers before routing.
                route = getattr(scope.get("route"), "path", "none")
                metrics.requests.labels(method, route, str(status)).inc()
                metrics.seconds.labels(method, route).observe(time.monotonic() - started)
