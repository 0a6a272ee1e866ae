"""The body of `/v1/chat/completions`: messages, tools, and how they become a prompt."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from rollout.errors import InvalidInputError
from rollout.server.body_fields import Listed, refuse_unknown
from rollout.server.openai.output_grammar import Grammar
from rollout.server.openai.parsers.forced_calls import named_call_schema, required_calls_schema
from rollout.server.openai.prompt_logprobs import NumPromptLogprobs
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.types import SamplingParams


class AsSent(BaseModel):
    """A part of a body that chat templates get as it was sent, in its own order of names."""

    model_config = ConfigDict(strict=True, extra="allow")

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, check: ModelWrapValidatorHandler[AsSent]) -> AsSent:
        checked = check(value)
        if isinstance(value, dict):
            checked._sent = value
        return checked

    @property
    def sent(self) -> dict[str, Any]:
        return self._sent


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    """The function that a call names; its arguments are a JSON object, mostly written as text."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(AsSent):
    role: str
    content: str | Listed[ContentPart] | None = None
    tool_calls: Listed[MessageCall] | None = None

    def for_template(self, field: str) -> dict[str, Any]:
        """The message as chat templates take it: its content is one text.

        Raises InvalidInputError naming a part of ``field`` that is no text.
        """
        extra = self.model_extra or {}
        refuse_unknown({name: extra.get(name) for name in _NOT_TEXT}, frozenset(), f"{field}.")
        message = dict(self.sent)
        if not self.tool_calls:
            message.pop("tool_calls", None)  # templates ask whether it is there
            if self.content is None:
                raise InvalidInputError(
                    f"{field}.content", None, "must be text, in a message without tool_calls"
                )
        if isinstance(self.content, list):
            message["content"] = "\n".join(
                _text(part, f"{field}.content[{index}]") for index, part in enumerate(self.content)
            )
        return message


_NOT_TEXT = ("function_call", "audio")  # parts of messages


def _text(part: ContentPart, field: str) -> str:
    if part.type != "text" or part.text is None:
        raise InvalidInputError(field, part.type, "messages may hold text alone")
    return part.text


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1)
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments")


class Tool(AsSent):
    type: Literal["function"]
    function: Function


class ChatBody(OpenAISamplingBody):
    messages: Listed[Message]
    max_completion_tokens: int | None = Field(None, description="default: what the context leaves")
    max_tokens: int | None = Field(None, description="its former name")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description="`auto`; `none`: calls are not looked for, and stay text; `required`, or an "
        "object that names a function: the whole output is a call",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: the answer has the first call alone"
    )
    prompt_logprobs: NumPromptLogprobs | None = None
    return_prompt_token_ids: bool | None = Field(None, description="in each choice, as sglang's")
    return_meta_info: bool | None = Field(
        None, description="each choice has the `meta_info` of sglang's /generate"
    )
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="true: the tokenizer's special tokens that the template did not write"
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="for chat templates that read it")
    enable_thinking: bool | None = Field(None, description="for chat templates that read it")
    separate_reasoning: bool | None = Field(
        None, description="false: reasoning stays in the content"
    )
    stream_reasoning: bool | None = Field(
        None, description="false: reasoning comes in one piece, when it has ended"
    )

    def check_fields(self) -> None:
        """Raises InvalidInputError also for fields of chats that exclude each other."""
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError("top_logprobs", self.top_logprobs, "needs logprobs=true")
        for name in ("prompt_logprobs", "return_meta_info"):
            asked = getattr(self, name)
            if asked not in (None, False) and self.stream:
                raise InvalidInputError(name, asked, "needs stream=false")
        if self.logprob_token_ids and not self.logprobs:
            raise InvalidInputError(
                "logprob_token_ids", self.logprob_token_ids, "needs logprobs=true"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidInputError(
                "continue_final_message", True, "is for add_generation_prompt=false"
            )
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidInputError(
                "max_tokens", self.max_tokens, f"differs from max_completion_tokens={both[0]}"
            )
        if self.tool_choice not in (None, "none", "auto") and self.forced_functions is None:
            raise InvalidInputError(
                "tool_choice",
                self.tool_choice,
                "must be none, auto, required or the name of one of the tools",
            )

    @property
    def begins_answer(self) -> bool:
        """The prompt ends where the assistant's turn begins."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them. Raises InvalidInputError."""
        return [
            message.for_template(f"messages[{index}]")
            for index, message in enumerate(self.messages)
        ]

    @property
    def functions(self) -> dict[str, Any]:
        """The JSON schemas of parameters, by the function's name."""
        return {tool.function.name: tool.function.parameters for tool in self.tools or ()}

    @property
    def forced_functions(self) -> dict[str, Any] | None:
        """Functions; the model must call one of them. None: no call is forced."""
        functions = self.functions
        if self.tool_choice == "required":
            return functions or None
        chosen = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        name = chosen.get("name") if isinstance(chosen, dict) else None
        if not isinstance(name, str) or name not in functions:
            return None
        return {name: functions[name]}

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the output: that of a call, where one is forced."""
        asked, forced = super().grammar, self.forced_functions
        if forced is None:
            return asked
        if asked is not None:
            raise InvalidInputError("tool_choice", self.tool_choice, f"excludes {asked[0]}")
        if self.tool_choice == "required":
            max_calls = 1 if self.parallel_tool_calls is False else None
            return "json_schema", required_calls_schema(forced, max_calls)
        (parameters,) = forced.values()
        return "json_schema", named_call_schema(parameters)

    @property
    def wants_calls(self) -> bool:
        """Calls of its tools are to be told from text."""
        return bool(self.tools) and self.tool_choice != "none"

    def params(
        self, prompt_len: int, max_context_len: int, seed: int, grammar_after: str | None = None
    ) -> SamplingParams:
        """The engine's sampling parameters. Raises InvalidInputError naming the field."""
        asked = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return self.sampling_params(
            max_tokens=max(1, max_context_len - prompt_len) if asked is None else asked,
            seed=seed,
            top_logprobs=self.top_logprobs or 0,
            grammar_after=None if self.grammar is None else grammar_after,
            **self.asked_of_tokens,
        )
