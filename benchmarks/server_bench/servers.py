"""Servers to measure: a process of its own, or one that shares its engine with the benchmark."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from rollout import RolloutEngine
from rollout.config import ModelConfig
from rollout.server.app import make_app
from rollout.server.bounded_http import BoundedHttp
from rollout.server.config import ServeConfig, ServerConfig
from rollout.server.serving import Serving

_START_SECONDS = 300.0


class ServedProcess:
    """`specrollout serve` on a free port of this machine, without keys."""

    def __init__(self, model: Path, spec: str, threads: int, kv_tokens: int) -> None:
        """Returns when it is ready."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        arguments = [
            "serve", f"model.path={model}", f"spec={spec}", f"num_threads={threads}",
            f"memory.max_kv_tokens={kv_tokens}", f"server.port={self.port}",
            "server.log_level=warning",
        ]  # fmt: skip
        self._process = subprocess.Popen([sys.executable, "-m", "rollout.cli", *arguments])
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.1)

    def cpu_seconds(self) -> float:
        """CPU seconds of all its threads since it began."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def close(self) -> int:
        """Drain it. The process's exit status."""
        self._process.terminate()
        return self._process.wait(60)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def served_here(engine: RolloutEngine, model: Path, **server: Any) -> Iterator[tuple[int, Serving]]:
    """The application under uvicorn on a thread of its own; its port."""
    config = ServeConfig(model=ModelConfig(path=str(model)), server=ServerConfig(port=0, **server))
    serving = Serving(engine, config)
    listener = socket.create_server(("127.0.0.1", 0))
    uvicorn_server = uvicorn.Server(
        uvicorn.Config(make_app(serving), http=BoundedHttp, log_config=None)
    )
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not uvicorn_server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)
        yield listener.getsockname()[1], serving
    finally:
        uvicorn_server.should_exit = True
        serving.close()
        thread.join()
