"""What a server says of its engine after everything that it was asked so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.hang import wait_until

T = TypeVar("T")
Samples = dict[tuple[str, tuple[str, ...]], float]


def scrape(client: httpx.Client) -> Samples:
    """The metrics by name without the prefix, and label values."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name.removeprefix("specrollout_"), tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def fresh_metrics(client: httpx.Client) -> Samples:
    return _taken_anew(lambda: scrape(client), lambda found: found["status_age_seconds", ()])


def fresh_status(client: httpx.Client) -> dict[str, Any]:
    return _taken_anew(lambda: client.get("/status").json(), lambda found: found["age"])


def _taken_anew(ask: Callable[[], T], age: Callable[[T], float]) -> T:
    """Ask until the engine's status is younger than this call. It may be an older one that is told
    again, and its age is that of when it was told: some time after it was asked for."""
    began = time.monotonic()
    answers: list[T] = []

    def is_new() -> bool:
        asked = time.monotonic()
        answers.append(ask())
        return age(answers[-1]) < asked - began

    wait_until(is_new)
    return answers[-1]
