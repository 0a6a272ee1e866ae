"""`specrollout serve` in a process of its own, and answers that have begun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.helpers.hang import HANG_SECONDS

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


def stream_of(url, max_new_tokens):
    """An answer that has begun; the events that come after are read by the caller."""
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": [5, 6], "stream": True, "sampling_params": sampling}
    return httpx.stream("POST", f"{url}/generate", json=body, timeout=HANG_SECONDS)


def last_event(lines) -> dict:
    events = [line for line in lines if line and line != "data: [DONE]"]
    return json.loads(events[-1].removeprefix("data: "))
