"""External corpora over HTTP: loaded beside generation, listed with their progress, removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.engine.protocol import Engine
from tests.helpers.gated_list import GatedList
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.server.conftest import Live, post, run_server
from tests.server.policies import output_ids

ADD, REMOVE, LIST = "/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"
TEXT = "one two three four five six seven eight nine zero"
ENGINE = {"num_threads": 1, "spec_options": {"max_external_tokens": 200_000}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora-root")


@pytest.fixture(scope="module")
def shared(text_model_path: Path, root: Path) -> Iterator[Live]:
    with run_server(text_model_path, ENGINE, {"corpora_root": str(root)}) as live:
        yield live


@pytest.fixture
def client(shared: Live) -> Iterator[httpx.Client]:
    """A client of a server that has no corpora, before and after."""
    with shared.client() as client:
        yield client
        for name in listed(client):
            post(client, REMOVE, corpus_id=name)
        assert client.get(LIST).json()["corpus_token_counts"] == {}


def listed(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {each["corpus_id"]: each for each in client.get(LIST).json()["corpora"]}


def test_texts_token_ids_and_files(client, root):
    before = output_ids(client)
    (root / "corpus.jsonl").write_text(f"{json.dumps(TEXT)}\n" * 3 + json.dumps({"text": TEXT}))
    assert post(client, ADD, corpus_id="texts", documents=[TEXT, "", TEXT]) == {
        "success": True, "message": "loaded", "corpus_id": "texts", "loaded_token_count": 20,
    }  # fmt: skip
    added = post(client, ADD, corpus_id="ids", token_chunks=[[1, 2, 3], before])
    assert added["loaded_token_count"] == 3 + len(before)
    added = post(client, ADD, corpus_id="file", file_path="corpus.jsonl")
    assert added["loaded_token_count"] == 40
    body = client.get(LIST).json()
    assert body["corpus_token_counts"] == {"texts": 20, "ids": 3 + len(before), "file": 40}
    assert {each["state"] for each in body["corpora"]} == {"published"}
    assert all(each["num_bytes"] > 0 and each["progress"] == 1 for each in body["corpora"])
    assert output_ids(client) == before
    assert post(client, REMOVE, corpus_id="ids")["success"] is True
    names = {post(client, ADD, documents=[TEXT])["corpus_id"] for _ in range(2)}  # made up
    assert len(names) == 2
    assert set(listed(client)) == {"texts", "file"} | names
    taken = client.post(ADD, json={"corpus_id": "texts", "documents": [TEXT]})
    assert taken.status_code == 409
    assert "'texts' is taken" in taken.json()["message"]
    unknown = client.post(REMOVE, json={"corpus_id": "b"})
    assert (unknown.status_code, unknown.json()["success"]) == (404, False)
    assert "there are: " in unknown.json()["message"]


def test_a_corpus_that_cannot_be_loaded_leaves_nothing(client, root, tmp_path):
    (root / "broken.jsonl").write_text(f"{json.dumps(TEXT)}\n{{\n")
    (root / "out.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (tmp_path / "secret.jsonl").write_text(json.dumps(TEXT))
    for body, reason in (
        ({}, "exactly one"),
        ({"documents": [TEXT], "token_chunks": [[1]]}, "exactly one"),
        ({"documents": []}, "at least one token"),
        ({"token_chunks": [[1, 97]]}, "token_chunks[0]"),
        ({"token_chunks": [list(range(90)) * 2300]}, "could not be loaded"),
        ({"file_path": "broken.jsonl"}, "broken.jsonl:2"),
        ({"file_path": "out.jsonl"}, "must lead below"),
        ({"file_path": "a\0b"}, "without '..'"),
        ({"documents": [TEXT], "corpus_id": "\udcff"}, ""),
    ):
        content = json.dumps({"corpus_id": "bad"} | body)
        answer = client.post(ADD, content=content, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert reason in answer.json()["error"]["message"], body
        assert listed(client) == {}


@contextmanager
def loading(live: Live, name: str) -> Iterator[None]:
    """A load that the engine has begun and that waits, as one of a large file would be seen."""
    chunks = GatedList([[1, 2, 3]] * 30_000)

    def add(engine: Engine) -> str:
        return engine.add_external_corpus(name, token_chunks=chunks)

    live.serving.loop.call(add).result(HANG_SECONDS)
    assert chunks.reached.wait(HANG_SECONDS)
    try:
        yield
    finally:
        chunks.opened.set()


def test_generation_and_other_loads_go_on_beside_a_load(client, shared):
    with loading(shared, "slow"):
        assert listed(client)["slow"]["state"] == "loading"
        assert 0 <= listed(client)["slow"]["progress"] < 1
        assert "slow" not in client.get(LIST).json()["corpus_token_counts"]
        assert len(output_ids(client)) == 12
        added = post(client, ADD, corpus_id="quick", documents=[TEXT])
        assert added["loaded_token_count"] == 10
        assert client.post(ADD, json={"corpus_id": "slow", "documents": [TEXT]}).status_code == 409
    wait_until(lambda: listed(client)["slow"]["state"] == "published")
    assert listed(client)["slow"]["num_tokens"] == 90_000


def test_a_load_may_be_removed_and_need_not_be_waited_for(client, shared):
    """One load runs at a time beside the two that wait here, so that they cannot end first."""
    with ExitStack() as slow:
        for index in range(2):
            slow.enter_context(loading(shared, f"slow-{index}"))
        later = post(client, ADD, corpus_id="later", documents=[TEXT], wait=False)
        assert (later["loaded_token_count"], later["message"]) == (0, "loading")
        with ThreadPoolExecutor(1) as threads:
            body = {"corpus_id": "awaited", "documents": [TEXT]}
            awaited = threads.submit(client.post, ADD, json=body)
            wait_until(lambda: "awaited" in listed(client))
            client.post(REMOVE, json={"corpus_id": "awaited"})
            assert awaited.result(HANG_SECONDS).status_code in (200, 409)
        post(client, REMOVE, corpus_id="slow-0")
        assert "slow-0" not in listed(client)


def test_clients_that_wait_hear_of_the_servers_end_and_of_what_it_cannot_load(open_server, root):
    (root / "other.jsonl").write_text(json.dumps(TEXT))
    live = open_server(engine=ENGINE)
    with live.client() as client, ThreadPoolExecutor(1) as threads, ExitStack() as slow:
        answer = client.post(ADD, json={"file_path": str(root / "other.jsonl")})
        assert answer.status_code == 400
        assert "without server.corpora_root" in answer.json()["message"]
        for index in range(2):
            slow.enter_context(loading(live, f"slow-{index}"))
        body = {"corpus_id": "awaited", "documents": [TEXT]}
        awaited = threads.submit(client.post, ADD, json=body)
        with live.client() as other:
            wait_until(lambda: "awaited" in listed(other))
        live.serving.is_draining = True
        answer = awaited.result(HANG_SECONDS)
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
