"""Messages as chat templates want them, and templates that want something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout import InvalidInputError
from rollout.engine.chat_template import ChatTemplate
from rollout.engine.tokenizer import PromptEncoder

USER = {"role": "user", "content": "one"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
OBJECTS = (
    "{{ messages[1].content }}{% for c in messages[1].tool_calls %}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
TEXTS = (
    "{{ messages[1]['content'] + '' }}{% for c in messages[1]['tool_calls'] %}"
    "{{ '```' + c['function']['arguments'] + '```' }}{% endfor %}"
)


@pytest.fixture
def encoder(text_model_path: Path) -> PromptEncoder:
    return PromptEncoder.from_pretrained(text_model_path, 97)


def with_template(encoder: PromptEncoder, template: Any) -> ChatTemplate:
    encoder.tokenizer.chat_template = template
    return encoder.chat_template


def calling(arguments: object, **fields: object) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call], **fields}]


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"a":1}', {"a": 1}])
def test_arguments_are_what_the_template_takes(
    encoder: PromptEncoder, arguments: object, fields: dict[str, object]
) -> None:
    messages = calling(arguments, **fields)
    assert with_template(encoder, OBJECTS).render(messages, "messages") == '{"a": 1}'
    assert messages == calling(arguments, **fields), "the caller's messages were changed"
    as_text = ChatTemplate(encoder.tokenizer)
    encoder.tokenizer.chat_template = TEXTS
    text = arguments if isinstance(arguments, str) else '{"a": 1}'
    assert as_text.render(messages, "messages") == f"```{text}```"


def test_no_arguments_are_an_empty_object(encoder: PromptEncoder) -> None:
    template = with_template(encoder, OBJECTS)
    assert template.render(calling(""), "messages") == template.render(calling(None), "messages")
    assert template.render(calling(""), "messages") == "{}"


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", "[" * 100_000])
def test_arguments_that_are_no_object_are_named(encoder: PromptEncoder, arguments: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        with_template(encoder, OBJECTS).render(calling(arguments), "messages")
    assert refused.value.field == "messages[1].tool_calls[0].function.arguments"


def test_tools_pick_the_template(encoder: PromptEncoder) -> None:
    template = with_template(
        encoder, {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    )
    assert template.render([USER], "messages") == "plain"
    assert template.render([USER], "messages", tools=TOOLS) == "f"
    assert "tools" in template.names


def test_names_are_those_of_expressions_alone(encoder: PromptEncoder) -> None:
    template = with_template(
        encoder,
        'tools {# more #}{% if enable_thinking %}{{ \'thinking\' + "it\\"s tools" }}{% endif %}',
    )
    assert {"if", "enable_thinking", "endif"} == template.names


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('two users') }}",
        "{{ messages | dictsort }}",
        "{{ messages[5].content.text }}",
        "{{ 1 // 0 }}",
        "{{ messages + 'x' }}",
    ],
)
def test_a_template_that_raises_is_bad_input(encoder: PromptEncoder, template: str) -> None:
    with pytest.raises(InvalidInputError, match="must suit the chat template, which says: ") as bad:
        with_template(encoder, template).render([USER], "messages")
    assert bad.value.field == "messages"


@pytest.mark.parametrize(
    "message", [1, {}, {"role": "user"}, {"content": "x"}, {"role": "user", "tool_calls": []}]
)
def test_messages_need_role_and_content(encoder: PromptEncoder, message: Any) -> None:
    with pytest.raises(InvalidInputError, match="needs `role` and `content`") as refused:
        encoder.encode([USER, message])
    assert refused.value.field == "prompt[1]"
