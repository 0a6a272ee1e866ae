"""Who may call what, and from where."""

from __future__ import annotations

import logging
import re

import pytest

from rollout.errors import InvalidInputError
from rollout.server.config import ServerConfig

USER_CALLS = [("GET", "/v1/loads"), ("GET", "/get_server_info"), ("POST", "/generate")]
ADMIN_CALLS = [
    ("POST", "/continue_generation"),
    ("GET", "/flush_cache"),
    ("POST", "/weights_checker"),
    ("POST", "/drain"),
    ("POST", "/abort_requests"),
]
VLLM_ADMIN_CALLS = [
    ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/sleep"),
    ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/reset_prefix_cache"),
    ("POST", "/init_weight_transfer_engine"), ("POST", "/start_weight_update"),
    ("POST", "/update_weights"), ("POST", "/finish_weight_update"), ("POST", "/collective_rpc"),
]  # fmt: skip
ABORT_ALL = {"abort_all": True}
BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}


def statuses(live, key):
    """The statuses of a user's calls and of an admin's, aborting everyone's requests included."""
    with live.client(key) as client:
        user = {client.request(m, p, json=BODY).status_code for m, p in USER_CALLS}
        admin = {client.request(m, p, json={}).status_code for m, p in ADMIN_CALLS}
        admin.add(client.post("/abort_request", json=ABORT_ALL).status_code)
        assert client.get("/health").status_code == 200
    assert len(user) == len(admin) == 1
    return user.pop(), admin.pop()


def test_without_keys_everything_is_open_on_this_machine(live):
    assert statuses(live, None) == (200, 200)


def test_users_and_admins_have_keys_of_their_own(open_server):
    live = open_server(api_key="user-key", admin_key="admin-key")
    assert statuses(live, None) == (401, 401)
    assert statuses(live, "wrong") == (401, 401)
    assert statuses(live, "user-key") == (200, 403)
    assert statuses(live, "admin-key") == (200, 200)
    with live.client("user-key") as user, live.client() as nobody:
        for method, path in VLLM_ADMIN_CALLS:
            assert user.request(method, path).status_code == 403, path
        for path in ("/tokenizer_info", "/version", "/liveness", "/get_world_size"):
            assert user.get(path).status_code == 200, path
            assert nobody.get(path).status_code == 401, path
        assert nobody.get("/ping").status_code == 200
        page, docs, schema = (nobody.get(path) for path in ("/", "/docs", "/openapi.json"))
        assert (page.status_code, nobody.get("/status").status_code) == (200, 401)
        assert "user-key" not in page.text
        assert "url: '/openapi.json'" in docs.text
        (script,) = re.findall(r'<script src="(.*?)">', docs.text)
        assert nobody.get(script).status_code == 200
        generate = schema.json()["paths"]["/generate"]["post"]
        assert {"requestBody", "security"} <= set(generate)


def test_one_key_alone(open_server):
    live = open_server(api_key="user-key")
    assert statuses(live, None) == (401, 401)
    assert statuses(live, "user-key") == (200, 403)
    with live.client("user-key") as client:
        refused = client.post("/pause_generation", json={})
    assert "SPECROLLOUT_ADMIN_KEY" in refused.json()["error"]["message"]
    live = open_server(admin_key="admin-key")
    assert statuses(live, None) == (200, 401)
    assert statuses(live, "admin-key") == (200, 200)


def test_without_a_key_no_body_is_read_and_no_path_told_from_another(open_server):
    live = open_server(api_key="user-key", max_body_bytes=100)
    with live.client() as client:
        for header in ("user-key", "Basic user-key", "Bearer", "Bearer  user-key", b"Bearer \xe9"):
            answer = client.get("/v1/loads", headers={"Authorization": header})
            assert answer.status_code == 401, header
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"
        right = {"Authorization": "bearer user-key"}
        assert client.get("/v1/loads", headers=right).status_code == 200
        headers = {"Content-Type": "application/json"}
        for path in ("/generate", "/nowhere", "/metrics", "/health/"):
            for body in (b"{", b"x" * 1000):
                answer = client.post(path, content=body, headers=headers)
                assert answer.status_code == 401, path


def test_keys_are_shown_nowhere(open_server, caplog):
    keys = {"api_key": "key-of-users", "admin_key": "key-of-admins"}
    with caplog.at_level(logging.DEBUG):
        live = open_server(**keys)
        with live.client("key-of-users") as client:
            texts = [
                client.get("/get_server_info").text,
                client.post("/pause_generation", json={}).text,
                client.post("/generate", json={"input_ids": "x"}).text,
                client.get("/openapi.json").text,
            ]
    texts += [caplog.text, repr(live.serving.config)]
    for key in keys.values():
        assert not any(key in text for text in texts)


def test_pages_of_other_origins_are_refused(live):
    with live.client() as client:
        for headers, status in (
            ({}, 200),
            ({"Host": "localhost:1"}, 200),
            ({"Host": "rebound.example"}, 403),
            ({"Host": "127.0.0.1.example"}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 200),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": live.url}, 200),
        ):
            assert client.get("/flush_cache", headers=headers).status_code == status, headers


def test_configurations_that_cannot_be():
    for fields, name in (
        ({"api_key": ""}, "api_key"),
        ({"api_key": "two words"}, "api_key"),
        ({"admin_key": "ключ"}, "admin_key"),
        ({"api_key": "same", "admin_key": "same"}, "admin_key"),
        ({"port": 70000}, "port"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_batch": 10, "max_queue": 5}, "max_batch"),
    ):
        with pytest.raises(InvalidInputError, match=f"server.{name}") as refused:
            ServerConfig(**fields)
        if name.endswith("key") and all(fields.values()):
            assert not any(value in str(refused.value) for value in fields.values())
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):  # other machines need a key
        with pytest.raises(InvalidInputError, match="SPECROLLOUT_API_KEY"):
            ServerConfig(host=host)
        assert not ServerConfig(host=host, api_key="k").is_loopback
    for own in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert ServerConfig(host=own).is_loopback
