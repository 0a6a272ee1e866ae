"""Calls and reasoning in what models write: the same however the text is cut, and never lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.server.config import ReasoningParserName, ToolParserName
from rollout.server.openai.message_reader import MessagePart, MessageReader
from rollout.server.openai.parsers import TOOL_PARSERS, deepseek, reads_reasoning, tool_parser
from rollout.server.openai.parsers.think import ThinkParser

TOOLS: dict[str, Any] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "say": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"enum": ["1", "2"]},
            "loud": {"type": ["boolean", "null"]},
            "how": {"type": "object"},
        },
    },
    "now": None,
}
ADD = ("add", {"a": 1, "b": 2.5})
SAY = (
    "say",
    {"text": 'é "</x>"\n{[', "maybe": None, "level": "1", "loud": True, "how": {"k": [1]}},
)
NOW = ("now", {})

HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>'
SAY_JSON = json.dumps(SAY[1])
QWEN_SAY = (
    "<tool_call>\n<function=say>\n<parameter=text>\n"
    + str(SAY[1]["text"])
    + "\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n<parameter=level>\n1\n</parameter>\n"
    '<parameter=loud>\nTrue\n</parameter>\n<parameter=how>\n{"k": [1]}\n</parameter>\n'
    "</function>\n</tool_call>"
)
QWEN_ADD = "<function=add><parameter=a>1</parameter><parameter=b>\n2.5\n</parameter></function>"
GLM_SAY = (
    f"<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>{SAY[1]['text']}</arg_value>\n"
    "<arg_key>maybe</arg_key>\n<arg_value>null</arg_value>\n"
    "<arg_key>level</arg_key><arg_value>1</arg_value><arg_key>loud</arg_key>"
    '<arg_value>true</arg_value>\n<arg_key>how</arg_key>\n<arg_value>{"k": [1]}</arg_value>\n'
    "</tool_call>"
)
ALL_BEGIN, ALL_END = deepseek.ALL_BEGIN, deepseek.ALL_END
BEGIN, END, SEP = deepseek.BEGIN, deepseek.END, deepseek.SEPARATOR
V3_ADD = f'{BEGIN}function{SEP}add\n```json\n{{"a": 1, "b": 2.5}}\n```{END}'
V31_SAY = f"{BEGIN}say{SEP}{SAY_JSON}{END}"
MISTRAL_LIST = f'[{{"name": "say", "arguments": {SAY_JSON}, "id": "abcdefgh1"}}, {{"name": "now"}}]'

WRITTEN: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", f"Well.\n\n{HERMES_ADD}", "Well.", [ADD]),
    ("hermes", f'{HERMES_ADD}\n<tool_call>{{"name": "now"}}</tool_call>', "", [ADD, NOW]),
    ("hermes", f'a <tool_call>{{"arguments": {SAY_JSON}, "name": "say"}}  </tool_call> b <',
     "a b <", [SAY]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}', "", [NOW]),
    ("hermes", '<tool_call>{"name": "unheard of", "arguments": {}}', "", [("unheard of", {})]),
    ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2.5}}', "", [ADD]),
    ("llama3",
     f' {{"name": "say", "arguments": {SAY_JSON}}}; \n{{"name": "now", "parameters": {{}}}}',
     "", [SAY, NOW]),
    ("llama3", 'So: <|python_tag|>{"name": "other", "parameters": {}}', "So:", [("other", {})]),
    ("mistral", f"[TOOL_CALLS] {MISTRAL_LIST}", "", [SAY, NOW]),
    ("mistral", 'Hm.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2.5}[TOOL_CALLS]now{}', "Hm.", [ADD, NOW]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefgh1[ARGS]{"a": 1, "b": 2.5}', "", [ADD]),
    ("qwen3_coder", f"I say.\n{QWEN_SAY}\n{QWEN_SAY}", "I say.", [SAY, SAY]),
    ("qwen3_coder", f"{QWEN_ADD} done", "done", [ADD]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW]),
    ("deepseek", f"{ALL_BEGIN}{V3_ADD}\n{V3_ADD}{ALL_END}", "", [ADD, ADD]),
    ("deepseek", f"Yes{ALL_BEGIN}{V31_SAY}{V31_SAY}{ALL_END}", "Yes", [SAY, SAY]),
    ("glm45", f"\nOh\n{GLM_SAY}\n{GLM_SAY}", "\nOh", [SAY, SAY]),
    ("glm45", "<tool_call>now</tool_call>", "", [NOW]),
]  # fmt: skip

TEXT_ALONE: list[tuple[str, str]] = [
    ("hermes", "use <tool_call> for calls, as in <tool_calls>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> cut'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "b" c"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000),
    ("llama3", '{"name": "Ada", "parameters": {}}'),
    ("llama3", '{"name": "add", "parameters": {"a": 1'),
    ("llama3", '<|python_tag|>print("x")'),
    ("llama3", 'The call is {"name": "add", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS] [{"name": "now"}, 1]'),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</functio"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("deepseek", f"{ALL_BEGIN} are they"),
    ("deepseek", f"{BEGIN}add{SEP}{{}}{END[:-3]}"),
    ("glm45", "<tool_call>two words</tool_call>"),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"),
]


def reader(name: str, begins_inside: bool | None = None) -> MessageReader:
    think = None if begins_inside is None else ThinkParser(begins_inside)
    return MessageReader(think, TOOL_PARSERS[ToolParserName(name)](TOOLS))


def read(messages: MessageReader, texts: Sequence[str]) -> MessagePart:
    """All parts, joined."""
    whole = MessagePart()
    for part in [*map(messages.push, texts), messages.finish()]:
        whole.content += part.content
        whole.reasoning += part.reasoning
        whole.calls += part.calls
    return whole


def cut(text: str, at: Sequence[int]) -> list[str]:
    places = [0, *sorted({place % (len(text) + 1) for place in at}), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def test_calls_are_told_from_text() -> None:
    for name, text, content, calls in WRITTEN:
        part = reader(name).finish(text)
        found = [(call.name, json.loads(call.arguments)) for call in part.calls]
        assert (found, part.content) == (calls, content), (name, text)
    for name, text in TEXT_ALONE:
        part = reader(name).finish(text)
        assert (part.calls, part.content) == ([], text), (name, text)


def test_a_call_that_is_cut_by_length_is_text() -> None:
    """Wherever a text ends, calls that were complete count, and all of the rest is text."""
    for name, text, _, _ in WRITTEN:
        whole = reader(name).finish(text)
        for end in range(len(text)):
            part = reader(name).finish(text[:end])
            assert part.calls == whole.calls[: len(part.calls)]
            if not part.calls:
                assert part.content == text[:end]


FRAGMENTS = st.sampled_from(
    sorted({marker for parser in TOOL_PARSERS.values() for marker in parser.markers})
    + ['{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "parameters": {}}', "<function="]
    + ["<think>", "</think>", "add", " ", "\n", '"', "{", "}", "[", "]", "\\", ";", "é", "```json"]
    + ["<parameter=a>", "</parameter>", "</function>", "say\n", "]]</"]
    + [text for _, text, _, _ in WRITTEN]
)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from([name.value for name in TOOL_PARSERS]),
    fragments=st.lists(FRAGMENTS, max_size=8),
    at=st.lists(st.integers(0, 10**6), max_size=12),
    begins_inside=st.sampled_from([None, False, True]),
)
def test_cuts_change_nothing(
    name: str, fragments: list[str], at: list[int], begins_inside: bool | None
) -> None:
    text = "".join(fragments)
    whole = read(reader(name, begins_inside), [text])
    assert read(reader(name, begins_inside), cut(text, at)) == whole
    assert read(reader(name, begins_inside), list(text)) == whole


def test_reasoning_is_told_from_content() -> None:
    for text, begins_inside, reasoning, content in (
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n<think>hm", False, "hm", ""),
        ("hm\n\nho\n</think>\n\nyes </think> <think>", True, "hm\n\nho",
         "yes </think> <think>"),
        ("<think>\nhm</think>yes", True, "hm", "yes"),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        (" yes <think>no</think>", False, "", " yes <think>no</think>"),
        ("hm </thin", True, "hm </thin", ""),
        ("hm \n", True, "hm \n", ""),
    ):  # fmt: skip
        for texts in [text], list(text):
            part = read(MessageReader(ThinkParser(begins_inside), None), texts)
            assert (part.reasoning, part.content) == (reasoning, content), text


def test_reasoning_may_come_in_one_piece() -> None:
    messages = MessageReader(ThinkParser(True), None, streams_reasoning=False)
    parts = [messages.push(text) for text in ("a", "b ", "c</thi", "nk>", "\nd", "e")]
    assert [part.reasoning for part in parts] == ["", "", "", "", "a" + "b c", ""]
    assert [part.content for part in parts] == ["", "", "", "", "d", "e"]


def test_calls_in_reasoning_and_after_the_first_are_left_out() -> None:
    part = reader("hermes", begins_inside=True).finish(f"{HERMES_ADD}</think>{HERMES_ADD}")
    assert part.reasoning == HERMES_ADD
    assert len(part.calls) == 1
    parser = TOOL_PARSERS[ToolParserName.hermes](TOOLS)
    messages = MessageReader(None, parser, parallel_calls=False)
    part = messages.finish(HERMES_ADD * 3)
    assert len(part.calls) == messages.num_calls == 1
    assert part.content == ""


TEMPLATES = {
    "hermes": "{{ '<tool_call>\\n{\"name\": ' }}",
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=x>",
    "glm45": "<tool_call>{{ tc.name }}<arg_key>",
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "deepseek": f"<tool_call> {ALL_BEGIN}{BEGIN}f{SEP}",
    "llama3": "<|start_header_id|>{{ '\"parameters\": ' }}",
    "none": "<|im_start|>{{ messages }}",
}


def test_formats_are_guessed_from_the_chat_template() -> None:
    hermes = ToolParserName.hermes
    for name, template in TEMPLATES.items():
        expected = TOOL_PARSERS.get(ToolParserName(name))
        assert tool_parser(ToolParserName.auto, template) is expected
        assert tool_parser(hermes, template) is TOOL_PARSERS[hermes]
        assert tool_parser(ToolParserName.none, template) is None
    auto = ReasoningParserName.auto
    assert reads_reasoning(auto, "{{ '<think>\\n' }}")
    assert not reads_reasoning(auto, "thinking")
    assert reads_reasoning(ReasoningParserName.think, "")
    assert not reads_reasoning(ReasoningParserName.none, "<think>")
