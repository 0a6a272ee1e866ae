"""The real application under uvicorn on a free port, over a tiny model that reads text."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn
from fastapi.dependencies import models
from prometheus_client.parser import text_string_to_metric_families

from rollout import RolloutEngine
from rollout.config import ModelConfig
from rollout.server.app import make_app
from rollout.server.config import ServeConfig, ServerConfig
from rollout.server.http_protocol import HttpProtocol
from rollout.server.serving import Serving
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.text_model import save_text_model
from tests.server.policies import Policy, policy, read_policy


@dataclass(frozen=True)
class Live:
    """A server that answers at ``url``."""

    url: str
    serving: Serving
    engine: RolloutEngine  # touched by its own thread alone: ask `serving.loop.call`

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=HANG_SECONDS, headers=headers)

    def wait_until_idle(self) -> None:
        """Until every request has ended, then the pools' books balance and nothing is held."""
        wait_until(lambda: not self.serving.loop.num_unfinished)
        self.serving.loop.call(_check_idle).result(HANG_SECONDS)


T = TypeVar("T")
OpenServer = Callable[..., Live]
Samples = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture(scope="module", autouse=True)
def _forgotten_routes() -> Iterator[None]:
    """FastAPI remembers the functions of thousands of routes, and with them servers' engines."""
    yield
    for function in vars(models).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture(scope="session")
def text_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama of 97 words that knows chats; its context is 512 tokens."""
    return save_text_model(tmp_path_factory.mktemp("text-model"), max_positions=512)


@pytest.fixture(scope="session")
def offline(text_model_path: Path) -> RolloutEngine:
    """An engine of the same model that drafts nothing: what servers must answer."""
    return RolloutEngine.from_pretrained(text_model_path, "none")


@pytest.fixture
def open_server(text_model_path: Path) -> Iterator[OpenServer]:
    """``open_server(engine={...}, **server)``: a server with those options, closed after the test.

    ``engine``: overrides of `RolloutEngine.from_pretrained`; ``server``: fields of ServerConfig;
    ``breaks``: the test breaks the engine, so it need not be idle afterwards.
    """
    with ExitStack() as at_end:

        def open_one(
            engine: dict[str, Any] | None = None, *, breaks: bool = False, **server: Any
        ) -> Live:
            return at_end.enter_context(
                run_server(text_model_path, engine or {}, server, breaks=breaks)
            )

        yield open_one


@pytest.fixture(scope="module")
def live(text_model_path: Path) -> Iterator[Live]:
    """One server without keys for all tests of a file; each must leave it idle."""
    with run_server(text_model_path, {}, {}) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


@pytest.fixture(scope="session")
def weights_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights-root")


@pytest.fixture(scope="session")
def first(text_model_path: Path) -> Policy:
    """The policy that every server of the text model starts with."""
    return read_policy(text_model_path)


@pytest.fixture(scope="session")
def second(weights_root: Path, first: Policy) -> Policy:
    """Another one, in the folder ``second`` below the root."""
    found = policy(weights_root / "second", 1)
    assert found.output_ids != first.output_ids
    return found


@pytest.fixture(scope="module")
def weights_live(text_model_path: Path, weights_root: Path) -> Iterator[Live]:
    """One server for all tests of a file that may read weights below the root."""
    options = {"weights_root": str(weights_root)}
    with run_server(text_model_path, {"num_threads": 1}, options) as live:
        yield live


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    """The answer to a call that must succeed."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(stream: httpx.Response) -> Iterator[Any]:
    """The events of a stream as they come, up to its ``[DONE]``."""
    lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
    for line in lines:
        if line == "[DONE]":
            assert next(lines, None) is None
            return
        yield json.loads(line)
    raise AssertionError("a stream that breaks off")


def client_of(live: Live, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{live.url}/v1", api_key=key, timeout=HANG_SECONDS, max_retries=0
    )


def joined_parts(chunks: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """The text of all chunks of completions or chats, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(
                part.index, {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "a choice goes on after its end"
            text = part.text if hasattr(part, "text") else part.delta.content
            choice["text"] += text or ""
            choice["token_ids"] += getattr(part, "token_ids", None) or []
            if part.logprobs is not None:
                choice["logprobs"].append(part.logprobs)
            choice["finish_reason"] = part.finish_reason
    return choices


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
    """Ask until the engine's status is younger than this call."""
    began = time.monotonic()
    answers: list[T] = []

    def is_new() -> bool:
        asked = time.monotonic()
        answers.append(ask())
        return age(answers[-1]) < asked - began

    wait_until(is_new)
    return answers[-1]


@contextmanager
def run_server(
    model: Path, engine_options: dict[str, Any], server: dict[str, Any], *, breaks: bool = False
) -> Iterator[Live]:
    engine = RolloutEngine.from_pretrained(model, **({"max_running": 8} | engine_options))
    config = ServeConfig(model=ModelConfig(path=str(model)), server=ServerConfig(port=0, **server))
    serving = Serving(engine, config)
    listener = socket.create_server((config.server.host, 0))
    host, port = listener.getsockname()
    uvicorn_server = uvicorn.Server(
        uvicorn.Config(
            make_app(serving),
            http=HttpProtocol,
            limit_concurrency=config.server.max_connections,
            log_config=None,
        )
    )
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: uvicorn_server.started or not thread.is_alive())
        assert thread.is_alive(), "uvicorn did not start"
        yield Live(f"http://{host}:{port}", serving, engine)
        if not breaks:
            Live("", serving, engine).wait_until_idle()
    finally:
        uvicorn_server.should_exit = True
        serving.close()
        thread.join(HANG_SECONDS)
        engine.close()
    assert not thread.is_alive()


def _check_idle(engine: RolloutEngine) -> None:
    engine.check_integrity()
    assert not engine.has_unfinished
    assert engine.worker.memory.usage.used == 0
