"""Gateways, unmodified, in front of the server: what it answers is what it answers without them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.text_model import save_text_model
from tests.helpers.vime_trainer import train
from tests.server.conftest import Live, run_server
from tests.server.policies import policy, read_policy

GATEWAYS = ("sglang_router", "smg", "vllm_router")
CHAT = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 9, "seed": 3}
LOGPROBS = {"logprobs": True, "top_logprobs": 2, "temperature": 0.8}
TOKENS = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9, "seed": 3, "logprobs": 0}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = save_text_model(tmp_path_factory.mktemp("served") / "policy", max_positions=512)
    with run_server(model, {"num_threads": 1}, {}) as live:
        yield live


@pytest.fixture(scope="module", params=GATEWAYS)
def gateway(
    request: pytest.FixtureRequest, server: Live, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of the gateway, whose one worker is the server."""
    with opened(request.param, server, tmp_path_factory.mktemp("gateway") / "log") as client:
        yield client


@contextmanager
def opened(name: str, server: Live, log: Path) -> Iterator[httpx.Client]:
    port = free_port()
    command = [
        sys.executable, "-m", f"{name}.launch_router", "--worker-urls", server.url,
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
        "--policy", "round_robin",
    ]  # fmt: skip
    with (
        log.open("wb") as output,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_SECONDS) as client,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            _wait_until_ready(client, process, log)
            yield client
        finally:
            process.terminate()


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + HANG_SECONDS
    while time.monotonic() < ends:
        assert process.poll() is None, log.read_text()
        try:
            if client.get("/health").status_code == client.get("/v1/models").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(log.read_text())


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sampled(answer: dict[str, Any]) -> list[Any]:
    """The parts of an answer that sampling decides."""
    names = ("message", "text", "logprobs", "token_ids", "finish_reason")
    return [{name: choice.get(name) for name in names} for choice in answer["choices"]]


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, str]:
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"]


def test_chats(gateway: httpx.Client, server: Live) -> None:
    (listed,) = gateway.get("/v1/models").json()["data"]
    chat = CHAT | LOGPROBS | {"model": listed["id"]}
    with server.client() as direct:
        wanted = sampled(post(direct, "/v1/chat/completions", chat))
    assert sampled(post(gateway, "/v1/chat/completions", chat)) == wanted
    plain = {name: value for name, value in chat.items() if name not in ("top_logprobs",)}
    text, reason = streamed(gateway, "/v1/chat/completions", plain)
    assert (text, reason) == (wanted[0]["message"]["content"], wanted[0]["finish_reason"])


def test_token_ids(gateway: httpx.Client, server: Live) -> None:
    """The calls that begin a turn with the very ids of the last, where the gateway knows them."""
    chat = CHAT | {"model": "policy", "messages": [], "tokens": [5, 6]}
    for path, body in (("/inference/v1/generate", TOKENS), ("/v1/chat/completions/tokens", chat)):
        answer = gateway.post(path, json=body)
        if answer.status_code == 404:
            pytest.skip("this gateway has no such call")
        with server.client() as direct:
            assert sampled(answer.json()) == sampled(post(direct, path, body))


def test_vime(tmp_path: Path) -> None:
    model = save_text_model(tmp_path / "policy", max_positions=512)
    policies = policy(tmp_path / "roots" / "new", 1), read_policy(model)
    roots = {"weights_root": str(tmp_path / "roots"), "profile_root": str(tmp_path / "profiles")}
    with (
        run_server(model, {"num_threads": 1}, roots) as live,
        opened("vllm_router", live, tmp_path / "log") as router,
    ):
        train(live, router, tmp_path / "profiles", policies)
