"""The served model's chat format: its template, and the parsers of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import InvalidInputError
from rollout.server.openai.chat_body import ChatBody
from rollout.server.openai.message_reader import MessageReader
from rollout.server.openai.parsers import reads_reasoning, think, tool_parser
from rollout.server.openai.parsers.forced_calls import NamedCallParser, RequiredCallsParser
from rollout.server.openai.parsers.pieces import ToolCall
from rollout.server.openai.parsers.think import ThinkParser
from rollout.server.openai.parsers.tool_calls import ToolCallParser
from rollout.server.serving import Serving

_THINKING = ("enable_thinking", "thinking")  # names that templates have for it


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    reads_reasoning: bool  # else it is text
    begins_inside: bool  # of reasoning, which the prompt has begun
    tool_parser: type[ToolCallParser] | None  # None: calls are text
    tools: Mapping[str, Any]  # schemas of parameters, by the function's name
    new_call_id: Callable[[], str]
    streams_reasoning: bool
    parallel_calls: bool

    @property
    def grammar_after(self) -> str | None:
        """The text after which a grammar holds; None: from the first token."""
        return think.END if self.begins_inside else None

    @property
    def markers(self) -> set[str]:
        """Texts that are looked for, where some tokenizers have special tokens."""
        parsers = [ThinkParser] * self.reads_reasoning + [self.tool_parser]
        return {marker for parser in parsers if parser is not None for marker in parser.markers}

    def open(self) -> MessageReader:
        return MessageReader(
            ThinkParser(self.begins_inside) if self.reads_reasoning else None,
            None if self.tool_parser is None else self.tool_parser(self.tools),
            streams_reasoning=self.streams_reasoning,
            parallel_calls=self.parallel_calls,
        )

    def write_call(self, call: ToolCall) -> dict[str, Any]:
        """The call as messages have it, with an id of its own."""
        return {
            "id": self.new_call_id(),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


class ChatFormat:
    def __init__(self, serving: Serving) -> None:
        self._encoder = serving.encoder
        self._max_prompt_len = serving.max_prompt_len
        self._template = serving.encoder.chat_template
        source = self._template.source
        self._tool_parser = tool_parser(serving.config.tool_parser, source)
        self._reads_reasoning = reads_reasoning(serving.config.reasoning_parser, source)

    def render(self, body: ChatBody) -> str:
        """The prompt's text. Raises InvalidInputError for features that the format lacks."""
        tools = [tool.sent for tool in body.tools or ()]
        if tools and "tools" not in self._template.names:
            raise InvalidInputError(
                "tools", tools, "the model's chat template knows none: leave them out"
            )
        if body.wants_calls and self._parser_for(body) is None:
            raise InvalidInputError(
                "tool_choice",
                body.tool_choice or "auto",
                "it is not known how the model writes calls: start the server with "
                "server.tool_parser=..., or ask for `none` and find them in the text",
            )
        return self._encoder.render_chat(
            body.conversation,
            tools=tools,
            add_generation_prompt=body.begins_answer,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=self._variables(body),
        )

    def encode(self, body: ChatBody, rendered: str) -> list[int]:
        """The token ids of the prompt's text. Raises InvalidInputError."""
        return self._encoder.encode_rendered(
            rendered,
            max_tokens=self._max_prompt_len,
            add_special_tokens=bool(body.add_special_tokens),
        )

    def message_format(self, body: ChatBody, prompt: str) -> MessageFormat:
        """The format of the body's answers; ``prompt``: its text. Raises InvalidInputError."""
        begins_inside = _ends_inside(body, prompt)
        separates = self._reads_reasoning and body.separate_reasoning is not False
        grammar = body.grammar
        is_free = body.wants_calls and body.forced_functions is None
        is_unread = begins_inside and body.forced_functions is not None and not separates
        if grammar is not None and (is_unread or is_free):
            remedy = "tool_choice=none" if is_free else "enable_thinking=false"
            raise InvalidInputError(
                *grammar, f"is for the whole output, and leaves no room for more: send {remedy}"
            )
        return MessageFormat(
            reads_reasoning=separates,
            begins_inside=begins_inside,
            tool_parser=self._parser_for(body),
            tools=body.functions if body.forced_functions is None else body.forced_functions,
            new_call_id=(self._tool_parser or ToolCallParser).new_call_id,
            streams_reasoning=body.stream_reasoning is not False,
            parallel_calls=body.parallel_tool_calls is not False,
        )

    def _parser_for(self, body: ChatBody) -> type[ToolCallParser] | None:
        if not body.wants_calls or body.forced_functions is None:
            return self._tool_parser if body.wants_calls else None
        return RequiredCallsParser if body.tool_choice == "required" else NamedCallParser

    def _variables(self, body: ChatBody) -> dict[str, Any]:
        """Variables of the template that fields of the body set; kwargs come last."""
        variables: dict[str, Any] = {}
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        thinks = body.enable_thinking
        if thinks is None and body.reasoning_effort == "none":
            thinks = False
        if thinks is not None:
            variables |= dict.fromkeys(_THINKING, thinks)
        read = {name: value for name, value in variables.items() if name in self._template.names}
        if body.enable_thinking is not None and read.keys().isdisjoint(_THINKING):
            raise InvalidInputError(
                "enable_thinking",
                body.enable_thinking,
                "the model's chat template does not ask for it: leave it out",
            )
        return {**read, **(body.chat_template_kwargs or {})}


def _ends_inside(body: ChatBody, prompt: str) -> bool:
    if body.continue_final_message:
        content = body.conversation[-1].get("content") or ""
        return content.rfind(think.BEGIN) > content.rfind(think.END)
    return body.begins_answer and prompt.rstrip().endswith(think.BEGIN)
