"""`specrollout serve`: its errors, its ready line, and its end."""

from __future__ import annotations

import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import httpx
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rollout.cli import main
from rollout.config import EngineConfig
from rollout.errors import InvalidInputError
from rollout.offline.hydra_config import register_schema
from rollout.server.command import allow_open_files, serve_config_from
from rollout.server.config import ServeConfig, ServerConfig
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.http_raw import open_request, read_status
from tests.server.server_process import paused_request, served


@pytest.fixture
def composed() -> Iterator:
    register_schema("serve_schema", ServeConfig)
    with initialize_config_module("rollout.conf", version_base="1.3"):
        yield lambda *overrides: compose("serve", overrides=list(overrides))
    GlobalHydra.instance().clear()


def test_the_defaults_are_the_dataclasses_own(composed, monkeypatch):
    monkeypatch.delenv("SPECROLLOUT_API_KEY", raising=False)
    monkeypatch.delenv("SPECROLLOUT_ADMIN_KEY", raising=False)
    config = serve_config_from(composed("model.path=m"))
    assert config.server == ServerConfig()
    assert config.engine == EngineConfig(model=config.model)
    assert config.spec["_target_"] == "spec_workers.ngram.build"


def test_keys_come_from_the_environment_and_are_not_in_the_configuration(composed, monkeypatch):
    monkeypatch.setenv("SPECROLLOUT_API_KEY", "12345")
    monkeypatch.setenv("SPECROLLOUT_ADMIN_KEY", "key-of-admins")
    config = composed("model.path=m", "server.host=0.0.0.0")
    server = serve_config_from(config).server
    assert (server.api_key, server.admin_key) == ("12345", "key-of-admins")
    assert "key-of-admins" not in OmegaConf.to_yaml(config)
    assert "12345" not in OmegaConf.to_yaml(config)


def test_a_model_must_be_given(composed):
    with pytest.raises(InvalidInputError, match=r"model\.path=my/model"):
        serve_config_from(composed())


@pytest.fixture
def failing(monkeypatch, capsys, tmp_path):
    """Runs a command that ends at once; its exit code and what it printed as an error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["specrollout", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        GlobalHydra.instance().clear()
        assert not list(tmp_path.iterdir()), "a server leaves no files behind"
        return ended.value.code, capsys.readouterr().err

    return run


def test_errors_are_one_line(failing, text_model_path):
    model = f"model={text_model_path}"
    code, error = failing()
    assert (code, error.count("\n")) == (2, 1)
    assert "model.path" in error
    code, error = failing(model, "server.host=0.0.0.0")
    assert code == 2
    assert "SPECROLLOUT_API_KEY" in error
    code, error = failing(model, "server.port=x")
    assert code == 2
    assert "override server.port=x\nValue 'x' of type" in error  # Hydra's own
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = failing(model, f"server.port={port}")
    assert (code, error.count("\n")) == (2, 1)
    assert f"server.port={port}" in error
    ranks = ("parallel=tensor", "parallel.size=4")
    code, error = failing(model, *ranks)
    assert (code, error.count("\n")) == (2, 1)
    assert "parallel.size=4: must divide the model's 6 query heads" in error
    code, error = failing(model, *ranks, "cluster=ray")
    assert (code, error.count("\n")) == (2, 1)
    assert "parallel.size=4: must divide the model's 6 query heads" in error  # before Ray starts
    code, error = failing(model, *ranks, "parallel.mode=lockstep")
    assert (code, error.count("\n")) == (2, 1)
    assert "parallel.mode='lockstep'" in error
    code, error = failing("model.path=/nowhere", "server.port=0")
    assert (code, error.count("\n")) == (1, 1)


def status_of(client: httpx.Client) -> int:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    return client.post("/generate", json=body).status_code


def wait_until_draining(client: httpx.Client) -> None:
    wait_until(lambda: client.get("/health").status_code != 200)


def test_a_signal_lets_what_runs_finish_and_takes_nothing_new(text_model_path):
    with served(text_model_path, f"server.drain_seconds={HANG_SECONDS}") as (process, url):
        with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client:
            assert status_of(client) == 200
        with paused_request(url) as (client, last):
            process.send_signal(signal.SIGTERM)
            wait_until_draining(client)
            assert status_of(client) == 503
            assert client.get("/health").status_code == 503
            assert client.post("/continue_generation", json={}).status_code == 200
            reason = last.result(HANG_SECONDS)["meta_info"]["finish_reason"]
        assert reason == {"type": "length", "length": 500}
        assert process.wait(HANG_SECONDS) == 0
        assert "Traceback" not in process.stdout.read()


def test_a_second_signal_ends_with_what_there_is(text_model_path):
    """All who wait are answered, also for a body that never comes, and the log has no traceback."""
    headers = {"Content-Type": "application/octet-stream", "Content-Length": "1000"}
    with served(text_model_path, f"server.drain_seconds={HANG_SECONDS}") as (process, url):
        with (
            paused_request(url) as (client, last),
            open_request(url, "POST", "/update_weights_from_tensor", headers) as half,
        ):
            half.sendall(b"a" * 500)
            wait_until(lambda: "in_flight 3.0" in client.get("/metrics").text)  # this one as well
            process.send_signal(signal.SIGTERM)
            wait_until_draining(client)
            process.send_signal(signal.SIGTERM)
            reason = last.result(HANG_SECONDS)["meta_info"]["finish_reason"]
            assert reason["type"] == "abort"
            assert read_status(half) == 503
        assert process.wait(HANG_SECONDS) == 0
        log = process.stdout.read()
        assert "Traceback" not in log
        assert "stopping: 1 requests" in log


OPEN_FILES = resource.RLIMIT_NOFILE


@pytest.fixture
def open_files_as_before() -> Iterator[None]:
    before = resource.getrlimit(OPEN_FILES)
    yield
    resource.setrlimit(OPEN_FILES, before)


@pytest.mark.usefixtures("open_files_as_before")
def test_the_limit_of_open_files_is_raised_and_not_lowered() -> None:
    allowed, most = resource.getrlimit(OPEN_FILES)
    resource.setrlimit(OPEN_FILES, (allowed - 100, most))
    allow_open_files(allowed - 50)
    assert resource.getrlimit(OPEN_FILES) == (allowed - 50, most)
    allow_open_files(10)
    assert resource.getrlimit(OPEN_FILES) == (allowed - 50, most)


@pytest.mark.usefixtures("open_files_as_before")
def test_more_open_files_than_there_may_be_are_said(caplog: pytest.LogCaptureFixture) -> None:
    most = resource.getrlimit(OPEN_FILES)[1]
    if most == resource.RLIM_INFINITY:
        pytest.skip("any number may be open")
    with caplog.at_level(logging.WARNING):
        allow_open_files(most + 1)
    assert resource.getrlimit(OPEN_FILES) == (most, most)
    assert "server.max_connections" in caplog.text
