"""External corpora over HTTP: loaded beside generation, listed with their progress, taken away."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rollout.engine.protocol import Engine
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.server.conftest import Live, run_server
from tests.server.policies import output_ids

ADD, REMOVE, LIST = "/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"
TEXT = "one two three four five six seven eight nine zero"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora-root")


@pytest.fixture(scope="module")
def shared(text_model_path: Path, root: Path) -> Iterator[Live]:
    engine = {"num_threads": 1, "spec_options": {"max_external_tokens": 200_000}}
    with run_server(text_model_path, engine, {"corpora_root": str(root)}) as live:
        yield live


@pytest.fixture
def client(shared: Live) -> Iterator[httpx.Client]:
    """A client of a server that has no corpora, before and after."""
    with shared.client() as client:
        yield client
        for name in listed(client):
            assert client.post(REMOVE, json={"corpus_id": name}).status_code == 200
        assert client.get(LIST).json()["corpus_token_counts"] == {}


def listed(client: httpx.Client) -> dict[str, dict]:
    return {each["corpus_id"]: each for each in client.get(LIST).json()["corpora"]}


def test_texts_token_ids_and_files(client, root):
    before = output_ids(client)
    (root / "corpus.jsonl").write_text(f"{json.dumps(TEXT)}\n" * 3 + json.dumps({"text": TEXT}))
    answer = client.post(ADD, json={"corpus_id": "texts", "documents": [TEXT, "", TEXT]})
    assert answer.json() == {
        "success": True, "message": "loaded", "corpus_id": "texts", "loaded_token_count": 20,
    }  # fmt: skip
    answer = client.post(ADD, json={"corpus_id": "ids", "token_chunks": [[1, 2, 3], before]})
    assert answer.json()["loaded_token_count"] == 3 + len(before)
    answer = client.post(ADD, json={"corpus_id": "file", "file_path": "corpus.jsonl"})
    assert answer.json()["loaded_token_count"] == 40
    body = client.get(LIST).json()
    assert body["corpus_token_counts"] == {"texts": 20, "ids": 3 + len(before), "file": 40}
    assert {each["state"] for each in body["corpora"]} == {"published"}
    assert all(each["num_bytes"] > 0 and each["progress"] == 1 for each in body["corpora"])
    assert output_ids(client) == before
    assert client.post(REMOVE, json={"corpus_id": "ids"}).json()["success"] is True
    assert set(listed(client)) == {"texts", "file"}


def test_an_id_is_made_where_none_is_given(client):
    names = {client.post(ADD, json={"documents": [TEXT]}).json()["corpus_id"] for _ in range(2)}
    assert names == set(listed(client))
    assert len(names) == 2


def test_ids_that_are_taken_and_unknown(client):
    body = {"corpus_id": "a", "documents": [TEXT]}
    assert client.post(ADD, json=body).status_code == 200
    answer = client.post(ADD, json=body)
    assert answer.status_code == 409
    assert "'a' is taken" in answer.json()["message"]
    answer = client.post(REMOVE, json={"corpus_id": "b"})
    assert answer.status_code == 404
    assert answer.json()["success"] is False
    assert "there are: a" in answer.json()["message"]


def test_what_cannot_be_loaded_leaves_nothing(client, root, tmp_path):
    (root / "broken.jsonl").write_text(f"{json.dumps(TEXT)}\n{{\n")
    (root / "out.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (tmp_path / "secret.jsonl").write_text(json.dumps(TEXT))
    for body, reason in (
        ({}, "exactly one"),
        ({"documents": [TEXT], "token_chunks": [[1]]}, "exactly one"),
        ({"documents": []}, "at least one token"),
        ({"documents": ["", ""]}, "at least one token"),
        ({"token_chunks": [[1, 97]]}, "token_chunks[0]"),
        ({"token_chunks": [[-1]]}, "token_chunks[0]"),
        ({"token_chunks": [list(range(90)) * 2300]}, "could not be loaded"),
        ({"file_path": "broken.jsonl"}, "broken.jsonl:2"),
        ({"file_path": "nothing.jsonl"}, "no such file"),
        ({"file_path": "."}, "no such file"),
        ({"file_path": "out.jsonl"}, "must lead below"),
        ({"file_path": str(tmp_path / "secret.jsonl")}, "must lead below"),
        ({"file_path": "../secret.jsonl"}, "without '..'"),
        ({"documents": [TEXT], "corpus_id": "\udcff"}, ""),
    ):
        answer = client.post(ADD, content=json.dumps({"corpus_id": "bad"} | body), headers=JSON)
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert reason in answer.json()["error"]["message"], body
        assert listed(client) == {}


JSON = {"Content-Type": "application/json"}


def test_bodies_that_are_not_as_they_should_be(client):
    def post(**what: object) -> int:
        return client.post(ADD, **what).status_code

    assert post(json={"documents": TEXT}) == 422
    assert post(json={"documents": [3]}) == 422
    assert post(json={"token_chunks": [["a"]]}) == 422
    assert post(json={"corpus_id": "", "documents": [TEXT]}) == 422
    assert post(json={"name": "a", "documents": [TEXT]}) == 422
    assert post(content=b"[", headers=JSON) == 400
    assert post(content=b'{"documents": ["a"]}', headers={"Content-Type": "text/plain"}) == 415
    assert client.post(REMOVE, json={}).status_code == 422
    assert client.post(ADD, json={"corpus_id": "f", "file_path": "a\0b"}).status_code == 400


class Slow(list):
    """Token ids of which all but the first chunk come when it is opened."""

    def __init__(self, chunks: list[list[int]]) -> None:
        super().__init__(chunks)
        self.opened, self.reached = threading.Event(), threading.Event()

    def __iter__(self):
        yield self[0]
        self.reached.set()
        assert self.opened.wait(HANG_SECONDS)
        yield from self[1:]


def add_slow(live: Live, name: str) -> Slow:
    """A load that the engine has begun and that waits, as one of a large file would be seen."""
    chunks = Slow([[1, 2, 3]] * 30_000)

    def add(engine: Engine) -> str:
        return engine.add_external_corpus(name, token_chunks=chunks)

    live.serving.loop.call(add).result(HANG_SECONDS)
    assert chunks.reached.wait(HANG_SECONDS)
    return chunks


def test_a_load_is_seen_and_generation_and_other_loads_go_on(client, shared):
    slow = add_slow(shared, "slow")
    try:
        assert listed(client)["slow"]["state"] == "loading"
        assert 0 <= listed(client)["slow"]["progress"] < 1
        assert "slow" not in client.get(LIST).json()["corpus_token_counts"]
        assert len(output_ids(client)) == 12
        answer = client.post(ADD, json={"corpus_id": "quick", "documents": [TEXT]})
        assert answer.json()["loaded_token_count"] == 10
        assert client.post(ADD, json={"corpus_id": "slow", "documents": [TEXT]}).status_code == 409
    finally:
        slow.opened.set()
    wait_until(lambda: listed(client)["slow"]["state"] == "published")
    assert listed(client)["slow"]["num_tokens"] == 90_000


def test_removing_one_that_loads_cancels_it(client, shared):
    slow = add_slow(shared, "slow")
    try:
        assert client.post(REMOVE, json={"corpus_id": "slow"}).status_code == 200
        assert listed(client) == {}
    finally:
        slow.opened.set()


def test_not_waiting_and_waiting_for_what_is_removed(client, shared):
    """One load runs at a time beside the two that wait here, so that they cannot end first."""
    slow = [add_slow(shared, f"slow-{index}") for index in range(2)]
    try:
        answer = client.post(ADD, json={"corpus_id": "later", "documents": [TEXT], "wait": False})
        assert answer.json()["loaded_token_count"] == 0
        assert answer.json()["message"] == "loading"
        with ThreadPoolExecutor(1) as threads:
            body = {"corpus_id": "awaited", "documents": [TEXT]}
            awaited = threads.submit(client.post, ADD, json=body)
            wait_until(lambda: "awaited" in listed(client))
            client.post(REMOVE, json={"corpus_id": "awaited"})
            assert awaited.result(HANG_SECONDS).status_code in (200, 409)
    finally:
        for each in slow:
            each.opened.set()


def test_whoever_waits_for_a_load_hears_of_the_servers_end(open_server):
    live = open_server(engine={"num_threads": 1, "spec_options": {"max_external_tokens": 200_000}})
    slow = [add_slow(live, f"slow-{index}") for index in range(2)]
    try:
        with live.client() as client, ThreadPoolExecutor(1) as threads:
            body = {"corpus_id": "awaited", "documents": [TEXT]}
            awaited = threads.submit(client.post, ADD, json=body)
            with live.client() as other:
                wait_until(lambda: "awaited" in listed(other))
            live.serving.is_draining = True
            answer = awaited.result(HANG_SECONDS)
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
    finally:
        for each in slow:
            each.opened.set()


def test_a_worker_without_a_corpus(open_server):
    with open_server(engine={"spec": "none"}).client() as client:
        answer = client.post(ADD, json={"documents": [TEXT]})
        assert answer.status_code == 400
        assert "spec=ngram" in answer.json()["message"]
        assert client.get(LIST).status_code == 400


def test_without_a_root_no_file_is_read(open_server, root):
    (root / "other.jsonl").write_text(json.dumps(TEXT))
    with open_server().client() as client:
        answer = client.post(ADD, json={"file_path": str(root / "other.jsonl")})
        assert answer.status_code == 400
        assert "without server.corpora_root" in answer.json()["message"]
