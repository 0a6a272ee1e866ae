"""The official client raises its own exceptions for faulty requests."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from rollout.server.body_fields import refuse_unknown
from rollout.server.openai.sampling_body import HARMLESS
from tests.server.conftest import Live
from tests.server.openai_clients import client_of

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "one"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_OBJECT = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}


def refused(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a body that must be refused as bad."""
    with live.client() as client:
        # Python's JSON knows infinity.
        answer = client.post(f"/v1/{path}", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt[1]", {"prompt": ["one", ""]}),
        ("prompt", {"prompt": [7, 10**30]}),
        ("prompt", {"prompt": [7, -1]}),
        ("prompt", {"prompt": [7, True]}),
        ("prompt", {"prompt": [7, "one"]}),
        ("prompt", {"prompt": {"text": "one"}}),
        ("n", {"n": 0}),
        ("n", {"n": -1}),
        ("n", {"n": 10**9}),
        ("n", {"n": 1.5}),
        ("n", {"n": 9 * 10**4299, "prompt": ["one", "two"]}),  # the product has a digit too many
        ("best_of", {"n": 1, "best_of": 2}),
        ("suffix", {"suffix": "end"}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": "16"}),
        ("stream", {"max_tokens": 0, "echo": True, "stream": True}),
        ("temperature", {"temperature": -0.5}),
        ("temperature", {"temperature": 1e400}),
        ("top_p", {"top_p": 0}),
        ("min_p", {"min_p": 1}),
        ("top_k", {"top_k": -2}),
        ("logprobs", {"logprobs": -1}),
        ("logprobs", {"logprobs": 10**6}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("seed", {"seed": 2**70}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": [1]}),
        ("stop", {"stop": ["x"] * 1000}),
        ("stop_token_ids", {"stop_token_ids": [97]}),
        ("logit_bias", {"logit_bias": {"one": 1.0}}),
        ("logit_bias", {"logit_bias": {"97": 1.0}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("include_reasoning", {"include_reasoning": False}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "root ::= x"}}),
        ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("regex", {"regex": "a", "guided_regex": "a"}),
        ("guided_grammar", {"guided_grammar": "root ::= x"}),
        ("sampling.regex", {"regex": "a"}),  # of a tokenizer of words nobody knows the bytes
        ("some_new_field", {"some_new_field": 1}),
    ],
)
def test_bad_completions_are_named(live: Live, field: str, fields: dict[str, Any]) -> None:
    assert refused(live, "completions", {"prompt": "one", **fields})["param"] == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "one"}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
        ("messages[0].content", {"messages": [{"role": "assistant", "tool_calls": []}]}),
        ("messages", {"messages": [{"role": "nobody", "content": "one"}]}),
        ("messages[0].content[1]", {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, IMAGE]}]}),
        ("messages[0].function_call", {"messages": [
            {"role": "assistant", "content": "one", "function_call": CALL["function"]}]}),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [
            {"role": "assistant", "tool_calls": [NO_OBJECT]}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tools", {"tools": [{"type": "function", "function": {}}]}),
        ("tools", {"tools": [{"type": "web_search"}], "tool_choice": "none"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("response_format.type", {"response_format": {"type": "structural_tag"}}),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
        ("sampling.json_schema", {"response_format": {"type": "json_object"}}),
        ("enable_thinking", {"enable_thinking": True}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("logprobs", {"logprobs": 2}),
        ("max_tokens", {"max_tokens": 2, "max_completion_tokens": 3}),
        ("continue_final_message", {"add_generation_prompt": True, "continue_final_message": True}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
    ],
)  # fmt: skip
def test_bad_chats_are_named(live: Live, field: str, fields: dict[str, Any]) -> None:
    assert refused(live, "chat/completions", {"messages": MESSAGES, **fields})["param"] == field


def test_text_that_has_no_encoding_is_refused(live: Live) -> None:
    with live.client() as client:
        for path, content in (
            ("completions", rb'{"prompt": "\ud800"}'),
            ("completions", rb'{"prompt": "one", "model": "\ud800"}'),
            ("completions", rb'{"prompt": "one", "\ud800": 1}'),
            ("completions", rb'{"prompt": "one", "logit_bias": {"\ud800": 1}}'),
            ("chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        ):
            answer = client.post(f"/v1/{path}", content=content, headers=JSON)
            assert answer.status_code in (400, 404), (content, answer.text)
            assert "body is not" not in answer.text


def test_what_asks_for_nothing_is_let_through(live: Live) -> None:
    with live.client() as client:
        for path, body in (("completions", {"prompt": "one"}),
                           ("chat/completions", {"messages": MESSAGES})):  # fmt: skip
            body |= {
                "max_tokens": 1, "tools": [], "response_format": {"type": "text"}, "suffix": None,
                "user": "me", "metadata": {"run": "1"}, "cache_salt": "1", "priority": 3,
                "skip_special_tokens": True, "use_beam_search": False, "bad_words": [],
                "tool_choice": "none", "n": None, "temperature": None, "seed": None,
                "include_stop_str_in_output": True, "parallel_tool_calls": True,
            }  # fmt: skip
            if path == "chat/completions":
                body |= {
                    "reasoning_effort": "high", "separate_reasoning": True,
                    "stream_reasoning": True,
                }  # fmt: skip
            answer = client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["thinking_token_budget", "truncate_prompt_tokens"])
def test_zero_is_not_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        refuse_unknown({name: 0}, HARMLESS)


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
    with pytest.raises(openai.BadRequestError, match=r"1 to 511 tokens") as long:
        client.completions.create(model=live.serving.model_name, prompt=[7] * 512)
    assert long.value.code == "context_length_exceeded"  # agents end a conversation by these
    assert "is longer than the model's context length" in str(long.value)


def test_nesting_that_a_chat_template_cannot_follow_is_bad_input(live: Live) -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    for fields in (
        {"messages": [{**MESSAGES[0], "note": deep}]},
        {"messages": MESSAGES, "chat_template_kwargs": {"note": deep}},
    ):
        assert refused(live, "chat/completions", fields)["param"] == "messages"
