"""`specrollout serve` in a process of its own, and a request that it cannot end yet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.helpers.hang import HANG_SECONDS, wait_until

SMALL = ("num_threads=1", "memory.max_kv_tokens=2048", "spec.calibration_seconds=0")


@contextmanager
def served(model, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command in a process of its own, and the URL that it says it serves at."""
    command = [sys.executable, "-m", "rollout.cli", "serve", f"model={model}", "server.port=0"]
    process = subprocess.Popen(
        [*command, *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # as a terminal's foreground job
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if ready := re.search(r"serving \S+ at (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            pytest.fail(f"it ended: {lines}")
        yield process, ready[1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def paused_request(url: str) -> Iterator[tuple[httpx.Client, Future[dict]]]:
    """A client of a server that is paused, and the last event of a stream that waits there."""
    with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client, ThreadPoolExecutor(1) as pool:
        client.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
        last = pool.submit(_last_event, url)
        try:
            wait_until(lambda: client.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 1)
            yield client, last
        except BaseException:
            client.post("/abort_request", json={"abort_all": True})  # else it is waited for
            raise


def _last_event(url: str) -> dict:
    sampling = {"max_new_tokens": 500, "ignore_eos": True}
    body = {"input_ids": [5, 6], "stream": True, "sampling_params": sampling}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=HANG_SECONDS) as stream:
        events = [line for line in stream.iter_lines() if line and line != "data: [DONE]"]
    return json.loads(events[-1].removeprefix("data: "))
