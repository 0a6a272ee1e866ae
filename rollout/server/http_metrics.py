"""Counters of HTTP calls and of the samples they ask for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.types import Rollout

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKENS = tuple(2**exponent for exponent in range(0, 18, 2))


class HttpMetrics:
    """The HTTP metrics of one server. Labels are bounded: clients choose none of their values."""

    def __init__(self) -> None:
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
        self.first_byte_seconds = Histogram(
            "specrollout_http_first_byte_seconds",
            "From an HTTP request to the beginning of its answer's body",
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

    @property
    def collectors(self) -> Iterator[Collector]:
        return iter(vars(self).values())

    def watch(self, future: Future[Rollout]) -> None:
        """Count a sample when it ends, on whatever thread that is."""
        started = time.monotonic()

        def count(ended: Future[Rollout]) -> None:
            if ended.cancelled():
                self.samples.labels("cancelled").inc()
            elif ended.exception() is not None:
                self.samples.labels("refused").inc()
            else:
                rollout = ended.result()
                self.samples.labels(rollout.finish_reason.value).inc()
                self.sample_seconds.observe(time.monotonic() - started)
                self.sample_tokens.observe(len(rollout.token_ids))

        future.add_done_callback(count)


class CountRequests:
    """ASGI middleware, to be the outermost: what others answer is counted too."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, started = self._metrics, time.monotonic()
        status, first_byte = 500, 0.0  # an app that raises has answered nothing, or not to the end

        async def watched(message: Message) -> None:
            nonlocal status, first_byte
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_byte:
                first_byte = time.monotonic() - started
            await send(message)

        with metrics.in_flight.track_inprogress():
            try:
                await self._app(scope, receive, watched)
            finally:
                method = scope["method"] if scope["method"] in _METHODS else "other"
                # The template; none where there is no such path, or nobody looked for it.
                route = getattr(scope.get("route"), "path", "none")
                metrics.requests.labels(method, route, str(status)).inc()
                metrics.seconds.labels(method, route).observe(time.monotonic() - started)
                if first_byte:
                    metrics.first_byte_seconds.labels(method, route).observe(first_byte)
