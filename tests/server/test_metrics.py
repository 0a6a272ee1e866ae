"""Metrics and status are counted once, bounded, and there whatever the engine does."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held
from tests.helpers.http_raw import open_request
from tests.server.conftest import Live, fresh_metrics, fresh_status, scrape
from tests.server.policies import generate, output_ids

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"


@pytest.fixture
def server(open_server) -> Live:
    return open_server(engine={"num_threads": 1})


@pytest.fixture
def client(server: Live) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_tokens_are_counted_once_however_often_they_are_read(client):
    for _ in range(3):
        assert len(output_ids(client)) == 12
    for _ in range(3):
        found = fresh_metrics(client)
        assert found["generated_tokens_total", ()] == 36
        assert found["samples_total", ("length",)] == 3
        assert found["sample_tokens_sum", ()] == 36
        assert found["time_to_first_token_seconds_count", ()] == 3
        assert found["time_per_output_token_seconds_count", ()] == 3
        assert found["http_requests_total", ("POST", "/generate", "200")] == 3
    assert found["requests_finished_total", ()] == 3
    assert found["prompt_tokens_total", ()] == 15
    forwards, accepted = found["target_forwards_total", ()], found["accepted_tokens_total", ()]
    assert forwards + accepted == 36
    # The first token and the eleven that follow make up the whole of each sample.
    first, each = (
        found[name, ()]
        for name in ("time_to_first_token_seconds_sum", "time_per_output_token_seconds_sum")
    )
    assert first > 0
    assert first + 11 * each == pytest.approx(found["sample_seconds_sum", ()])
    phases = [value for (name, _), value in found.items() if name == "step_seconds_total"]
    assert len(phases) == 5
    assert 0 < sum(phases) < found["http_request_seconds_sum", ("POST", "/generate")]
    assert found["requests_running", ()] == found["requests_unfinished", ()] == 0
    assert found["weight_version", ("target",)] == 0
    assert found["can_run", ()] == 1
    assert not any(name.endswith("_created") for name, _ in found)


def test_labels_are_not_the_clients_to_choose(client):
    client.get("/nothing/of/that/name")
    client.get("/another?name=1")
    client.request("PROPFIND", "/generate")
    client.post("/add_external_corpus", json={"corpus_id": "chosen", "documents": ["one two"]})
    for _ in range(3):
        assert client.get("/health_generate").status_code == 200
    found = fresh_metrics(client)
    assert found["http_requests_total", ("GET", "none", "404")] == 2
    assert found["http_requests_total", ("other", "/generate", "405")] == 1
    assert not any("chosen" in labels or "PROPFIND" in labels for _, labels in found)
    assert found["corpora", ("published",)] == 1
    assert found["corpora_tokens", ("published",)] == 2
    # Probes of health are no samples
    assert found["generated_tokens_total", ()] > 0
    assert found.get(("samples_total", ("length",)), 0) == 0
    assert found["time_to_first_token_seconds_count", ()] == 0


def test_samples_that_end_early_are_counted_by_their_end(client, server):
    asked = {"input_ids": [5], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    body = json.dumps(asked).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    with held(server.serving.loop):
        with open_request(server.url, "POST", "/generate", headers) as sent:
            sent.sendall(body)
            wait_until(lambda: server.serving.loop.num_unfinished)
        wait_until(lambda: not server.serving.loop.num_unfinished)  # the client has left
    wait_until(lambda: fresh_metrics(client).get(("samples_total", ("cancelled",))))
    with ThreadPoolExecutor(1) as threads, held(server.serving.loop):
        long = threads.submit(generate, client, max_new_tokens=500)
        wait_until(lambda: fresh_metrics(client)["requests_running", ()])
        client.post("/abort_request", json={"abort_all": True})
        assert long.result(HANG_SECONDS).json()["meta_info"]["finish_reason"]["type"] == "abort"
    found = fresh_metrics(client)
    assert found["samples_total", ("abort",)] == 1
    assert found["requests_running", ()] == found["requests_unfinished", ()] == 0


def test_an_engine_that_is_busy_is_not_waited_for(client, server):
    entered, opened = threading.Event(), threading.Event()

    def hold(_) -> None:
        entered.set()
        assert opened.wait(HANG_SECONDS)

    held = server.serving.loop.call(hold)
    try:
        assert entered.wait(HANG_SECONDS)
        ages = [scrape(client)["status_age_seconds", ()] for _ in range(3)]
        assert ages == sorted(ages)
        wait_until(lambda: scrape(client)["status_age_seconds", ()] > 0.5)
    finally:
        opened.set()
        held.result(HANG_SECONDS)
    fresh_metrics(client)


def test_status_is_json_for_the_page(live):
    with live.client() as client:
        output_ids(client)
        live.wait_until_idle()
        body = fresh_status(client)
        page = client.get("/")
    engine = body["engine"]
    assert body["model"] == live.serving.model_name
    assert (body["unfinished"], body["draining"]) == (0, False)
    assert 0 < body["uptime"] < 3600
    assert (engine["running"], engine["waiting"], engine["unavailable_reason"]) == (0, 0, "")
    assert engine["weight_versions"] == {"target": 0}
    assert engine["total"]["generated_tokens"] == 12
    cost = engine["learned"]["budget"]["cost"]
    assert len(cost["milliseconds"]) == len(cost["rows"]) == len(cost["observations"])
    assert all(map(math.isfinite, cost["milliseconds"]))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert len(page.content) < 50_000


def test_the_dashboard_asks_for_metrics_that_there_are(live):
    with live.client() as client:
        output_ids(client)
        exported = {name for name, _ in fresh_metrics(client)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"specrollout_(\w+)", target["expr"])
    }
    assert len(asked) > 12
    assert asked <= exported
