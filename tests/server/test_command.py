"""`specrollout serve`: its errors, its ready line, and its end."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rollout.cli import main
from rollout.config import EngineConfig
from rollout.offline.hydra_config import register_schema
from rollout.server.command import serve_config_from
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
    # Keys come from the environment and are not in the configuration
    monkeypatch.setenv("SPECROLLOUT_API_KEY", "12345")
    monkeypatch.setenv("SPECROLLOUT_ADMIN_KEY", "key-of-admins")
    config = composed("model.path=m", "server.host=0.0.0.0")
    server = serve_config_from(config).server
    assert (server.api_key, server.admin_key) == ("12345", "key-of-admins")
    assert "key-of-admins" not in OmegaConf.to_yaml(config)
    assert "12345" not in OmegaConf.to_yaml(config)


@pytest.fixture
def failing(monkeypatch, capsys, tmp_path, log_restored):
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
    ranks = (model, "parallel=tensor", "parallel.size=4")
    heads = "parallel.size=4: must divide the model's 6 query heads"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"server.port={taken.getsockname()[1]}"
        for arguments, code, message in (
            ((), 2, "model.path=my/model"),
            ((model, "server.host=0.0.0.0"), 2, "SPECROLLOUT_API_KEY"),
            ((model, port), 2, port),
            (ranks, 2, heads),
            ((*ranks, "cluster=ray"), 2, heads),  # before Ray starts
            ((*ranks, "parallel.mode=lockstep"), 2, "parallel.mode='lockstep'"),
            (("/nowhere", "--port", "0"), 1, "/nowhere/config.json"),
            ((model, "--port", "x"), 2, "server.port='x': Value 'x' of type"),
            ((model, "data.path=p.jsonl"), 2, "data.path='p.jsonl': no such key"),
        ):
            found, error = failing(*arguments)
            assert (found, error.count("\n")) == (code, 1), arguments
            assert message in error


def test_one_signal_takes_nothing_new_and_a_second_ends_what_runs(text_model_path):
    """Every client that waits is answered, also for a body that never comes."""
    headers = {"Content-Type": "application/octet-stream", "Content-Length": "1000"}
    generate = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    with served(text_model_path, f"server.drain_seconds={HANG_SECONDS}") as (process, url):
        with (
            paused_request(url) as (client, last),
            open_request(url, "POST", "/update_weights_from_tensor", headers) as half,
        ):
            half.sendall(b"a" * 500)
            wait_until(lambda: "in_flight 3.0" in client.get("/metrics").text)  # this one as well
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health").status_code != 200)
            assert client.get("/health").status_code == 503
            assert client.post("/generate", json=generate).status_code == 503
            assert not last.done()
            process.send_signal(signal.SIGTERM)
            reason = last.result(HANG_SECONDS)["meta_info"]["finish_reason"]
            assert reason["type"] == "abort"
            assert read_status(half) == 503
        assert process.wait(HANG_SECONDS) == 0
        log = process.stdout.read()
        assert "Traceback" not in log
        assert re.search(
            r"^20\d\d-\d\d-\d\d \d\d:\d\d:\d\d stopping: 1 requests", log, re.MULTILINE
        )
