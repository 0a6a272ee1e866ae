"""Refused calls name the field that is wrong, in every dialect, and change nothing."""

from __future__ import annotations

import gzip
import json

import httpx
import openai
import pytest

from rollout.server.body_fields import refuse_unknown
from rollout.server.openai.sampling_body import HARMLESS
from tests.server.conftest import Live, client_of

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "one"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ARRAY_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}
MANY = {"max_new_tokens": 1, "n": 1024}
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
ADAPTER = {"lora_name": "x", "lora_path": "x"}

GENERATE = [
    ("text", {}),
    ("text", {"text": "one", "input_ids": [5]}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": "five"}),
    ("batch", {"text": []}),
    ("len(prompt)", {"input_ids": [5] * 512}),
    ("sampling_params", {"input_ids": [5], "sampling_params": [{}, {}]}),
    ("lora_path", {"input_ids": [5], "lora_path": "x"}),
    ("rid", {"input_ids": [5], "rid": ""}),
    ("rid", {"input_ids": [5], "rid": "r" * 1025, "sampling_params": MANY}),
    ("logprob_start_len", {"input_ids": [5], "return_logprob": True, "logprob_start_len": 2}),
    ("routed_experts_start_len", {"input_ids": [5], "routed_experts_start_len": -1}),
    ("sampling.routed_experts", {"input_ids": [5], "return_routed_experts": True}),
    ("token_ids_logprob", {"input_ids": [5], "token_ids_logprob": [3]}),
    # vLLM's former body of this route
    ("prompt", {"prompt": "one"}),
    ("stream", {"prompt": {"prompt_token_ids": [5]}, "stream": True}),
    ("prompt_logprobs", {"prompt": {"prompt_token_ids": [5]}, "prompt_logprobs": 1}),
    ("detokenize", {"prompt": {"prompt_token_ids": [5]}, "detokenize": False}),
    ("include_stop_str_in_output",
     {"prompt": {"prompt_token_ids": [5]}, "include_stop_str_in_output": True}),
    ("sampling_logprobs_mode", {"input_ids": [5], "sampling_logprobs_mode": "support"}),
    ("sampling_logprobs_mode", {"input_ids": [5], "sampling_logprobs_mode": "nonsense"}),
]  # fmt: skip
GENERATE_SAMPLING = [
    ("sampling.temperature", {"temperature": -1}),
    ("sampling_params.temperature", {"temperature": "hot"}),
    ("sampling.ebnf", {"ebnf": 'root ::= "a"'}),
    ("sampling.regex", {"regex": "a+"}),  # this tokenizer's words have no known bytes
    ("sampling_params.seed", {"seed": 1, "sampling_seed": 2}),
    ("request_seed", {"request_seed": 2**64}),
    ("sampling_params.request_seed", {"request_seed": 1, "n": 2}),
    ("len(stop_token_ids)", {"stop_token_ids": [5] * 1025}),
    ("sampling_params.logit_bias", {"logit_bias": {"x": 1}}),
    ("batch", {"n": 10**12}),
    ("stop", {"stop": ["x"] * 65}),
    ("stop_regex", {"stop_regex": ["x" * 1025]}),
    ("sampling.stop_regex", {"stop_regex": "(?=a)"}),
    ("sampling_params.custom_params.thinking_budget", {"custom_params": {"thinking_budget": 9}}),
]
COMPLETIONS = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [7, 10**30]}),
    ("prompt", {"prompt": [7, True]}),
    ("n", {"n": 0}),
    ("n", {"n": 9 * 10**4299, "prompt": ["one", "two"]}),  # the product has a digit too many
    ("best_of", {"n": 1, "best_of": 2}),
    ("suffix", {"suffix": "end"}),
    ("max_tokens", {"max_tokens": "16"}),
    ("stream", {"max_tokens": 0, "echo": True, "stream": True}),
    ("temperature", {"temperature": -1}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("stop", {"stop": [""]}),
    ("sampling.stop_regex", {"stop_regex": "("}),
    ("logit_bias", {"logit_bias": {"one": 1.0}}),
    ("allowed_token_ids", {"allowed_token_ids": [97]}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.chunks", {"stream": True, "stream_options": {"chunks": 2}}),
    ("include_reasoning", {"include_reasoning": False}),
    ("service_tier", {"service_tier": "flex"}),
    ("sampling.ebnf", {"structured_outputs": {"grammar": "root ::= x"}}),
    ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}),
    ("regex", {"regex": "a", "guided_regex": "a"}),
    ("sampling.regex", {"regex": "a"}),
    ("some_new_field", {"some_new_field": 1}),
]
CHATS = [
    ("messages", {"messages": []}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "nobody", "content": "one"}]}),
    ("messages[0].content[1]", {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "one"}, IMAGE]}]}),
    ("messages[0].function_call", {"messages": [
        {"role": "assistant", "content": "one", "function_call": CALL["function"]}]}),
    ("messages[0].tool_calls[0].function.arguments", {"messages": [
        {"role": "assistant", "tool_calls": [ARRAY_CALL]}]}),
    ("tools", {"tools": [{"type": "function", "function": {}}]}),
    ("tools", {"tools": [{"type": "web_search"}], "tool_choice": "none"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("response_format.type", {"response_format": {"type": "structural_tag"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
    ("enable_thinking", {"enable_thinking": True}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("return_meta_info", {"return_meta_info": True, "stream": True}),
    ("max_tokens", {"max_tokens": 2, "max_completion_tokens": 3}),
    ("continue_final_message", {"add_generation_prompt": True, "continue_final_message": True}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
]  # fmt: skip
TOKENS = "/inference/v1/generate"
VLLM = [
    (TOKENS, "token_ids", {"token_ids": [], "sampling_params": {}}),
    (TOKENS, "len(prompt)", {"token_ids": [5] * 512, "sampling_params": {}}),
    (TOKENS, "sampling_params", {"token_ids": [5]}),
    (TOKENS, "sampling_params", {"token_ids": [5], "sampling_params": {"logprobs": True}}),
    (TOKENS, "sampling_params.logits_processors",
     {"token_ids": [5], "sampling_params": {"logits_processors": ["one"]}}),
    (TOKENS, "sampling_params.logprob_token_ids",
     {"token_ids": [5], "sampling_params": {"logprob_token_ids": [3]}}),
    (TOKENS, "features", {"token_ids": [5], "sampling_params": {}, "features": {"a": 1}}),
    (TOKENS, "stream",
     {"token_ids": [5], "sampling_params": {"prompt_logprobs": 0}, "stream": True}),
    ("/tokenize", "prompt", {}),
    ("/tokenize", "messages", {"messages": "one"}),
    ("/tokenize", "continue_final_message",
     {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}),
    ("/detokenize", "tokens", {"tokens": [-1]}),
    ("/detokenize", "len(tokens)", {"tokens": [5] * 513}),
    ("/v1/chat/completions/tokens", "tokens", {"messages": MESSAGES}),
]  # fmt: skip
CONTROL = [
    ("/pause_generation", "mode", {"mode": "later"}),
    ("/release_memory_occupation", "tags", {"tags": "weights"}),
    ("/remove_external_corpus", "corpus_id", {}),
    ("/add_external_corpus", "documents", {"documents": "one"}),
    ("/add_external_corpus", "token_chunks", {"token_chunks": [["a"]]}),
    ("/add_external_corpus", "corpus_id", {"corpus_id": "", "documents": ["one"]}),
    ("/update_weights_from_tensor", "serialized_named_tensors", {"serialized_named_tensors": []}),
    ("/update_weights_from_disk", "model_path", {"model_path": 3}),
    ("/update_weights_from_ipc", "handles", {}),
    ("/get_weights_by_name", "name", {"name": "nothing"}),
    ("/load_lora_adapter", "lora_path", {"lora_name": "x"}),
]
ROWS = [
    *(("/generate", 422, *row) for row in GENERATE),
    *(("/generate", 422, field, {"input_ids": [5], "sampling_params": sampling})
      for field, sampling in GENERATE_SAMPLING),
    *(("/v1/completions", 400, field, {"prompt": "one"} | body) for field, body in COMPLETIONS),
    *(("/v1/chat/completions", 400, field, {"messages": MESSAGES} | body)
      for field, body in CHATS),
    *((path, 400, field, body) for path, field, body in VLLM),
    *((path, 422, field, body) for path, field, body in CONTROL),
]  # fmt: skip


@pytest.mark.parametrize("path", sorted({path for path, *_ in ROWS}))
def test_a_bad_value_is_named(client: httpx.Client, path: str) -> None:
    for status, field, body in [row[1:] for row in ROWS if row[0] == path]:
        # large integers are JSON too
        answer = client.post(path, content=json.dumps(body), headers=JSON)
        error = answer.json()["error"]
        found = (answer.status_code, (error["param"] or "").split(".0")[0], error["type"])
        assert found == (status, field, "invalid_request_error"), (str(body)[:200], answer.text)


def test_a_bad_value_of_a_stream_or_of_one_prompt_is_named(client: httpx.Client) -> None:
    hot, cold = {"temperature": "hot"}, {"temperature": -1}
    for body, field in (
        ({"sampling_params": [{}, hot], "input_ids": [[5], [6]]}, "sampling_params.1.temperature"),
        ({"sampling_params": cold, "input_ids": [5], "stream": True}, "sampling.temperature"),
    ):
        answer = client.post("/generate", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, field)


def test_a_bad_query_is_named(client: httpx.Client) -> None:
    for method, path, query, field in (
        ("GET", "/flush_cache", {"timeout": "nan"}, "timeout"),
        ("POST", "/pause", {"mode": "stop"}, "mode"),
        ("POST", "/sleep", {"level": 3}, "level"),
        ("POST", "/wake_up", {"tag": "weights"}, "tag"),
        ("POST", "/flush_cache", {"no_such_query": 1}, "no_such_query"),
        ("GET", "/flush_cache", {"no_such_query": 1}, "no_such_query"),
    ):
        answer = client.request(method, path, params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, field), path
    # Options of raw bytes have no effect beside a JSON body
    body = BODIES["/update_weights_from_tensor"]
    answer = client.post("/update_weights_from_tensor", json=body, params={"weight_version": 7})
    assert answer.json()["error"]["param"] == "weight_version"


def test_neutral_values_are_let_through(live: Live, client: httpx.Client) -> None:
    """Clients and gateways send fields that nobody set, and their own names of the model."""
    name = live.serving.model_name
    both = {
        "max_tokens": 1, "tools": [], "response_format": {"type": "text"}, "suffix": None,
        "user": "me", "metadata": {"run": "1"}, "cache_salt": "1", "priority": 3,
        "skip_special_tokens": True, "use_beam_search": False, "bad_words": [],
        "tool_choice": "none", "n": None, "temperature": None, "seed": None,
        "include_stop_str_in_output": True, "parallel_tool_calls": True, "best_of": 1,
        "truncate_prompt_tokens": -1, "rid": "name", "no_stop_trim": False,
        "add_special_tokens": True,
    }  # fmt: skip
    reasoning = {"reasoning_effort": "high", "separate_reasoning": True, "stream_reasoning": True}
    generate = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1, "top_k": 2**80}}
    bodies = {
        "/v1/completions": {"prompt": "one"} | both,
        "/v1/chat/completions": {"messages": MESSAGES} | both | reasoning,
        "/generate": generate,
    }
    for path, body in bodies.items():
        for model in ("unknown", "default", "", f"org/{name}", live.serving.model_path, name):
            answer = client.post(path, json=body | {"model": model})
            assert answer.status_code == 200, answer.text
        for model in ("another", f"{name}/another"):
            answer = client.post(path, json=body | {"model": model})
            assert answer.status_code == 404
            assert model in answer.json()["error"]["message"]
    for name in ("thinking_token_budget", "truncate_prompt_tokens"):
        with pytest.raises(ValueError, match=name):
            refuse_unknown({name: 0}, HARMLESS)  # zero asks for something


def test_exceptions_of_the_official_client(live: Live) -> None:
    client = client_of(live)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=live.serving.model_name, messages=MESSAGES, temperature=-1
        )
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="one")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError, match="longer than the model's context") as long:
        client.completions.create(model=live.serving.model_name, prompt=[7] * 512)
    assert long.value.code == "context_length_exceeded"  # agents end a conversation by it


BODIES: dict[str, dict[str, object]] = {
    "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": [5], "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/update_weight_version": {"new_version": "v1"},
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [5]},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/chat/completions/tokens": {"messages": MESSAGES, "tokens": [5], "max_tokens": 1},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/skyrl/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/abort_request": {"rid": "nobody"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AA=="]},
    "/update_weights_from_disk": {"model_path": "nowhere"},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/update_weights_from_ipc": {"handles": [{}]},
    "/init_weights_update_group": GROUP,
    "/get_weights_by_name": {"name": "model.norm.weight"},
    "/add_external_corpus": {"documents": ["one"]},
    "/remove_external_corpus": {"corpus_id": "none"},
    "/init_weight_transfer_engine": {"init_info": GROUP},
    "/update_weights": {"weight_dir": "nowhere"},
    "/fetch_weights": {"target_version": 1},
    "/load_lora_adapter": ADAPTER,
    "/v1/load_lora_adapter": ADAPTER,
    "/skyrl/v1/load_lora_adapter": ADAPTER,
    "/unload_lora_adapter": {"lora_name": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/collective_rpc": {"method": "none"},
}
"""The fields that a call must have, by path."""
OPENAI_CLIENTS = ("/v1/c", "/inference/", "/skyrl/v1/generate", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def methods(client: httpx.Client) -> dict[str, set[str]]:
    """The methods of each route, by path."""
    paths = client.get("/openapi.json").json()["paths"]
    return {path: {method.upper() for method in found} for path, found in paths.items()}


def test_an_unknown_field_is_refused_by_name(
    client: httpx.Client, methods: dict[str, set[str]]
) -> None:
    for path in [path for path, found in methods.items() if "POST" in found]:
        fields = BODIES.get(path, {})
        answer = client.post(path, json=fields | {"no_such_field": 1})
        assert answer.status_code in (400, 422)
        assert (path, answer.json()["error"]["param"]) == (path, "no_such_field")
        answer = client.post(path, json=fields, params={"no_such_query": 1})
        if path.startswith(OPENAI_CLIENTS):  # gateways add an api-version
            assert "no_such_query" not in answer.text
        else:
            assert (path, answer.json()["error"]["param"]) == (path, "no_such_query")


def test_other_methods_and_paths_are_told_what_there_is(
    client: httpx.Client, methods: dict[str, set[str]]
) -> None:
    for path, found in methods.items():
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - found:
            answer = client.request(method, path.replace("{name}", "m"))
            assert (path, method, answer.status_code) == (path, method, 405)
            assert set(answer.headers["Allow"].split(", ")) == found, path
            assert all(each in answer.json()["error"]["message"] for each in {method, *found})
    for path in (*methods, "/openapi.json", "/no_such_call"):
        if path == "/v1/models/{name}":
            continue  # a name may hold anything
        answer = client.post(f"{path}/".replace("//", "/no/"), headers={"Host": "localhost:1"})
        assert (path, answer.status_code) == (path, 404 if path != "/v1/models" else 405)
        assert "Location" not in answer.headers
    missing = client.post("/generate/", json={}).json()["error"]
    assert missing["type"] == "not_found_error"
    assert "leave out the last /" in missing["message"]
    assert "/openapi.json" in client.get("/no_such_call").json()["error"]["message"]


def test_a_body_that_is_no_json_is_told_why(client: httpx.Client) -> None:
    for body, why in (
        (b"{", "not JSON"),
        (b'{"text": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 20_000, "nested"),
        (b'{"input_ids": [%s]}' % (b"9" * 5000), "not JSON"),
    ):
        for path in ("/generate", "/add_external_corpus", "/v1/completions"):
            answer = client.post(path, content=body, headers=JSON)
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"], (path, body[:20])


@pytest.mark.parametrize("path", ["/generate", "/update_weights_from_tensor"])
def test_a_body_of_another_type_or_a_compressed_one_is_refused(
    client: httpx.Client, path: str
) -> None:
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/json"):
        answer = client.post(path, content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 415, kind
        assert "application/json" in answer.json()["error"]["message"]
    kind = "Application/JSON; charset=utf-8"
    taken = client.post(path, content=b'{"text": 3}', headers={"Content-Type": kind})
    assert taken.status_code in (400, 422)
    packed = gzip.compress(json.dumps(BODIES[path]).encode())
    answer = client.post(path, content=packed, headers=JSON | {"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["message"]
    assert answer.headers["Accept-Encoding"] == "identity"
