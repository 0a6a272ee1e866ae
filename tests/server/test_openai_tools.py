"""Agents' chats by the official client: tools, calls, reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.chain_model import save_chain_model
from tests.helpers.text_model import save_byte_model
from tests.server.conftest import Live, client_of, post, run_server

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} "
    "{% for call in message['tool_calls'] %}"
    "<tool_call> {{ call['function']['name'] }} {{ call['function']['arguments']['one'] }} "
    "{% endfor %}{{ message['tool_call_id'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> "
    "{% if enable_thinking is not defined or enable_thinking %}<think> {% endif %}{% endif %}"
)
CHAIN = (
    '<think> hm hm, </think> So: <tool_call> {"name": "add", "arguments": {"one": 7}} '
    "</tool_call> over"
)
OTHERS = ("add", "<user>", "<tool>", "7", "fifteen", "call_1")
ADD = {"type": "object", "properties": {"one": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}
]
PARTS = [{"type": "text", "text": "fifteen"}]
MESSAGES: list[Any] = [{"role": "user", "content": "fifteen"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = save_chain_model(
        tmp_path_factory.mktemp("agent"),
        [CHAIN, "<assistant> plain"],
        others=OTHERS,
        special=("<tool_call>", "</tool_call>"),
        chat_template=TEMPLATE,
    )
    with run_server(model, {"spec": "none"}, {}) as live:
        yield live


@pytest.fixture(scope="module")
def byte_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = save_byte_model(tmp_path_factory.mktemp("byte-model"), max_positions=256)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] += (
        "{% if tools %}{% endif %}{% if enable_thinking %}<think>{% endif %}{# </think> #}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with run_server(model, {}, {}) as live:
        yield live


def ask(live: Live, **asked: Any) -> Any:
    body = {"model": live.serving.model_name, "messages": MESSAGES, "tools": TOOLS}
    body |= {"temperature": 0, "max_tokens": 40}
    return client_of(live).chat.completions.create(**body | asked)


def test_a_call_is_told_from_text(live: Live) -> None:
    (choice,) = ask(live).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "hm hm,"
    assert choice.message.content == "So: over"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"one": 7}
    assert len(call.id) > 9


@pytest.mark.parametrize("extra", [{}, {"stream_reasoning": False, "return_token_ids": True}])
def test_a_stream_has_the_same_call(live: Live, extra: dict[str, Any]) -> None:
    chunks = list(ask(live, stream=True, n=2, extra_body=extra))
    for index in range(2):
        deltas = [part.delta for chunk in chunks for part in chunk.choices if part.index == index]
        assert "".join(delta.content or "" for delta in deltas) == "So: over"
        reasoning = [
            delta.reasoning_content for delta in deltas if "reasoning_content" in delta.model_extra
        ]
        assert "".join(reasoning) == "hm hm,"
        assert not extra or len(reasoning) == 1
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert (call.index, call.function.name) == (0, "add")
        assert json.loads(call.function.arguments) == {"one": 7}
        reasons = [
            part.finish_reason for chunk in chunks for part in chunk.choices if part.index == index
        ]
        assert reasons[-1] == "tool_calls"


def test_calls_and_their_results_become_the_prompt(live: Live) -> None:
    """The official client sends back the message that it got, with many other fields."""
    message = ask(live).choices[0].message.model_dump()
    call = message["tool_calls"][0] | {"id": "call_1"}
    history = [
        *MESSAGES,
        message | {"content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": PARTS},
    ]
    answer = ask(live, messages=history, max_tokens=1, extra_body={"return_token_ids": True})
    tokenizer = live.serving.encoder.tokenizer
    assert tokenizer.decode(answer.prompt_token_ids) == (
        "add <user> fifteen <assistant> <tool_call> add 7 <tool> fifteen call_1 <assistant> <think>"
    )


def test_calls_stay_text_if_they_are_not_asked_for(live: Live) -> None:
    extra = {"return_token_ids": True, "skip_special_tokens": False}
    answer = ask(live, tool_choice="none", extra_body=extra)
    (choice,) = answer.choices
    assert choice.message.tool_calls is None
    assert choice.message.content == (
        'So: <tool_call> {"name": "add", "arguments": {"one": 7}} </tool_call> over </s>'
    )
    assert answer.prompt_token_ids == ask(live, extra_body=extra).prompt_token_ids


def test_reasoning_may_stay_in_the_content_or_be_left_out(live: Live) -> None:
    (choice,) = ask(live, extra_body={"separate_reasoning": False}).choices
    assert choice.message.content == "hm hm, </think> So: over"
    assert not hasattr(choice.message, "reasoning_content")
    for extra in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
    ):
        (choice,) = ask(live, extra_body=extra).choices
        assert choice.message.content == "plain", extra
        assert choice.message.reasoning_content is None
        assert choice.finish_reason == "stop"


def parameters(name: str) -> dict[str, Any]:
    """A schema that one text alone obeys, but for spaces."""
    return {
        "$defs": {f"{name}_value": {"const": 1}},
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}_value"}},
        "required": [name],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_calls_may_be_forced(byte_live: Live, stream: bool) -> None:
    """The weights are random, and the template does not say how calls are written."""
    pytest.importorskip("llguidance")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters(name)}}
        for name in ("one", "two")
    ]
    spaces = byte_live.serving.encoder.tokenizer(" \n\t\r")["input_ids"]
    for choice in "required", {"type": "function", "function": {"name": "two"}}:
        asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        answer = ask(
            byte_live,
            **asked,
            seed=1,
            max_tokens=100,
            stream=stream,
            temperature=1,
            logit_bias=dict.fromkeys(map(str, spaces), -100),
        )
        parts = [part for chunk in answer for part in chunk.choices] if stream else answer.choices
        messages = [part.delta if stream else part.message for part in parts]
        (call,) = [call for message in messages for call in message.tool_calls or ()]
        assert json.loads(call.function.arguments) == {call.function.name: 1}
        assert choice == "required" or call.function.name == "two"
        assert parts[-1].finish_reason == "tool_calls"


EBNF = 'root ::= "ab"{3}'
GRAMMARS = {"regex": "(ab){3}"}, {"ebnf": EBNF}, {"structured_outputs": {"grammar": EBNF}}


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("thinks", [True, False])
def test_a_grammar_begins_where_reasoning_ends(
    byte_live: Live, monkeypatch: pytest.MonkeyPatch, thinks: bool, grammar: dict[str, Any]
) -> None:
    """In the chat, and in what its rendered form generates."""
    pytest.importorskip("llguidance")
    submit, asked = byte_live.serving.loop.submit, []

    def watched(prompt: Any, params: Any, **others: Any) -> Any:
        asked.append(params)
        return submit(prompt, params, **others)

    monkeypatch.setattr(byte_live.serving.loop, "submit", watched)
    extra = {**grammar, "enable_thinking": thinks, "return_token_ids": True}
    (choice,) = ask(byte_live, tools=[], max_tokens=6, extra_body=extra).choices
    with byte_live.client() as client:
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 6, **extra}
        rendered = post(client, "/v1/chat/completions/render", **body)
        (generated,) = post(client, "/inference/v1/generate", **rendered)["choices"]
    assert generated["token_ids"] == choice.token_ids
    after = "</think>" if thinks else None
    assert [params.grammar_after for params in asked] == [after] * 2
    if thinks:
        assert choice.message.content == ""
        assert choice.message.reasoning_content
    else:
        assert choice.message.content.startswith("ababab")


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_grammar_beside_tools_is_for_outputs_that_call_none(
    byte_live: Live, grammar: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance")
    (choice,) = ask(byte_live, tool_choice="none", max_tokens=6, extra_body=grammar).choices
    assert choice.message.content == "ababab"
    chat = {"messages": MESSAGES, "tools": TOOLS, **grammar}
    with byte_live.client() as client:
        rendered = post(client, "/v1/chat/completions/render", **chat, tool_choice="none")
        assert "grammar_after" not in rendered["sampling_params"]
        for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
            for body in (chat, chat | {"tool_choice": "required"}):
                answer = client.post(path, json=body)
                assert answer.status_code == 400
                named = answer.json()["error"]["param"]
                assert named in ("tool_choice", *("ebnf", "regex")), (path, named)
