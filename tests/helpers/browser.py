"""A headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hang import HANG_SECONDS

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


class Tab:
    """One page of it. What the browser calls an error or a violation of policy is kept."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, JSON-able. Promises are awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def wait_for(self, condition: str) -> Any:
        """Until the expression is true. Its value."""
        deadline = time.monotonic() + HANG_SECONDS
        while not (value := self.evaluate(condition)):
            assert time.monotonic() < deadline, (condition, self.text("main"), self.complaints[:3])
            time.sleep(0.05)
        return value

    def emulate(self, width: int, height: int, scheme: str = "light") -> None:
        """A screen of so many CSS pixels, and the colours its reader prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + HANG_SECONDS
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert select.select([self._events], [], [], max(0.0, left))[0], "the browser is silent"
            part = os.read(self._events, 2**20)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """``folder`` becomes its profile. Skips the test where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    to_read, commands = os.pipe()
    events, to_write = os.pipe()
    arguments = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
        "--remote-debugging-pipe", f"--user-data-dir={folder}",
    ]  # fmt: skip
    pid = _spawn(arguments, to_read, to_write)
    try:
        yield Tab(commands, events)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(commands)
        os.close(events)


def _spawn(arguments: list[str], to_read: int, to_write: int) -> int:
    """Its process id. It reads commands from descriptor 3 and writes to 4, as the protocol wants.

    Closes the two that are handed over.
    """
    # Out of the way of 3 and 4, which either of them may be.
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (to_read, to_write)]
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)
    ]
    actions += [
        (os.POSIX_SPAWN_DUP2, each, place) for each, place in zip(high, (3, 4), strict=True)
    ]
    try:
        return os.posix_spawn(arguments[0], arguments, os.environ, file_actions=actions)
    finally:
        for each in (to_read, to_write, *high):
            os.close(each)
