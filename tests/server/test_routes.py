"""Every route refuses other methods, other paths, and fields that it does not have."""

from __future__ import annotations

import gzip
import json

import pytest

NO_FIELDS: dict[str, object] = {}
ADAPTER = {"lora_name": "x", "lora_path": "x"}
BODIES: dict[str, dict[str, object]] = {
    "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": [5], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}]},
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [5]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "one"}]},
    "/v1/chat/completions/tokens": {
        "messages": [{"role": "user", "content": "one"}], "tokens": [5], "max_tokens": 1,
    },
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/skyrl/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/abort_request": {"rid": "nobody"},
    "/pause_generation": NO_FIELDS,
    "/continue_generation": NO_FIELDS,
    "/flush_cache": NO_FIELDS,
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AA=="]},
    "/update_weights_from_disk": {"model_path": "nowhere"},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/update_weights_from_ipc": {"handles": [{}]},
    "/begin_weight_update": NO_FIELDS,
    "/end_weight_update": NO_FIELDS,
    "/abandon_weight_update": NO_FIELDS,
    "/init_weights_update_group": {
        "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
    },
    "/destroy_weights_update_group": NO_FIELDS,
    "/get_weights_by_name": {"name": "model.norm.weight"},
    "/weights_checker": NO_FIELDS,
    "/add_external_corpus": {"documents": ["one"]},
    "/remove_external_corpus": {"corpus_id": "none"},
    "/release_memory_occupation": NO_FIELDS,
    "/resume_memory_occupation": NO_FIELDS,
    "/pause": NO_FIELDS,
    "/resume": NO_FIELDS,
    "/sleep": NO_FIELDS,
    "/wake_up": NO_FIELDS,
    "/reset_prefix_cache": NO_FIELDS,
    "/init_weight_transfer_engine": {
        "init_info": {
            "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
        },
    },
    "/start_weight_update": NO_FIELDS,
    "/update_weights": {"weight_dir": "nowhere"},
    "/finish_weight_update": NO_FIELDS,
    "/shutdown_weight_transfer_engine": NO_FIELDS,
    "/pull_weights": {"local_checkpoint_dir": "x", "source_dir": "x", "target_version": 0},
    "/load_lora_adapter": ADAPTER,
    "/v1/load_lora_adapter": ADAPTER,
    "/skyrl/v1/load_lora_adapter": ADAPTER,
    "/unload_lora_adapter": {"lora_name": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/collective_rpc": {"method": "none"},
}  # fmt: skip
"""By path, the fields that a call must have."""
OPENAI_CLIENTS = ("/v1/c", "/inference/", "/skyrl/v1/generate", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def methods(client) -> dict[str, set[str]]:
    """By path, of all routes."""
    paths = client.get("/openapi.json").json()["paths"]
    return {path: {method.upper() for method in found} for path, found in paths.items()}


def param_of(answer) -> str:
    """The field that a refusal names."""
    assert answer.status_code in (400, 422), answer.text
    return answer.json()["error"]["param"]


def test_a_field_that_is_not_known_is_refused_by_name(client, methods):
    assert {path for path, found in methods.items() if "POST" in found} == set(BODIES)
    for path, fields in BODIES.items():
        answer = client.post(path, json=fields | {"no_such_field": 1})
        assert (path, param_of(answer)) == (path, "no_such_field")
        answer = client.post(path, json=fields, params={"no_such_query": 1})
        if path.startswith(OPENAI_CLIENTS):  # gateways add an api-version
            assert "no_such_query" not in answer.text
        else:
            assert (path, param_of(answer)) == (path, "no_such_query")
    assert "no_such_query" in client.get("/flush_cache", params={"no_such_query": 1}).text


def test_a_field_that_comes_twice_is_refused_by_name(client):
    headers = {"Content-Type": "application/json"}
    for body in (
        b'{"mode": "in_place", "mode": "abort"}',
        b'{"mode": "abort", "x": [{"mode": 1, "mode": 2}]}',
        b'{"mode": "abort",%s "mode": "abort"}' % (b" " * 2**17),
    ):
        answer = client.post("/pause_generation", content=body, headers=headers)
        assert answer.status_code == 400
        assert "'mode' comes twice" in answer.json()["error"]["message"]


def test_options_beside_a_json_body_are_refused(client):
    """They would be without effect: the body holds them."""
    body = BODIES["/update_weights_from_tensor"]
    answer = client.post("/update_weights_from_tensor", json=body, params={"weight_version": 7})
    assert param_of(answer) == "weight_version"


def test_other_methods_are_told_which_there_are(client, methods):
    for path, found in methods.items():
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - found:
            answer = client.request(method, path.replace("{name}", "m"))
            assert (path, method, answer.status_code) == (path, method, 405)
            assert set(answer.headers["Allow"].split(", ")) == found, path
            message = answer.json()["error"]["message"]
            assert method in message
            assert all(each in message for each in found)


def test_other_paths_are_not_led_elsewhere(client, methods):
    for path in (*methods, "/openapi.json", "/no_such_call"):
        answer = client.post(f"{path}/".replace("{name}/", ""), headers={"Host": "localhost:1"})
        if path == "/v1/models/{name}":
            continue  # a name may hold anything
        assert (path, answer.status_code) == (path, 404 if path != "/v1/models" else 405)
        assert "Location" not in answer.headers
    message = client.post("/generate/", json={}).json()["error"]["message"]
    assert "/generate/" in message
    assert "leave out the last /" in message
    assert "/openapi.json" in client.get("/no_such_call").json()["error"]["message"]


def test_a_body_that_is_no_json_is_told_why(client):
    headers = {"Content-Type": "application/json"}
    for body, why in (
        (b'{"text": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 20_000, "nested"),
        (b'{"input_ids": [%s]}' % (b"9" * 5000), "digits"),
    ):
        for path in ("/generate", "/add_external_corpus", "/v1/completions"):
            answer = client.post(path, content=body, headers=headers)
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"], (path, body[:20])


@pytest.mark.parametrize("path", ["/generate", "/update_weights_from_tensor"])
def test_a_compressed_body_is_refused(client, path):
    """It is not unpacked: a few bytes could become any number."""
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps(BODIES[path]).encode())
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]
    assert answer.headers["Accept-Encoding"] == "identity"
