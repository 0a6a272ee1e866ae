"""The chat template of a tokenizer: messages and tools in, the text of a prompt out."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from rollout.errors import InvalidInputError

_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)  # the parts of a template that are no text
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)  # what templates raise, by `raise_exception` or because a value is not as they expect
_PROBE_ID = "abcdefgh1"  # Mistral's templates want nine letters and digits


class ChatTemplate:
    """A tokenizer's chat template, or several under names, of which transformers picks one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def exists(self) -> bool:
        """Whether messages can be rendered."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def source(self) -> str:
        """The text of the template; of all of them where it has several."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in its expressions: all variables that it reads, and others."""
        code = " ".join(_CODE.findall(self.source))
        return frozenset(_NAME.findall(_QUOTED.sub(" ", code)))

    @cached_property
    def takes_arguments_as_text(self) -> bool:
        """Whether it joins the arguments of calls to its own text, as DeepSeek's do; others want
        them as objects."""
        return not self._takes({"x": 1}) and self._takes('{"x": 1}')

    def _takes(self, arguments: object) -> bool:
        function = {"name": "f", "arguments": arguments}
        call = {"id": _PROBE_ID, "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            self._apply(messages, {})
        except _TEMPLATE_ERRORS:
            return False
        return True

    def markers(self) -> tuple[str, ...]:
        """Special tokens that it writes around a user's message."""
        user = [{"role": "user", "content": "x"}]
        rendered = self.render(user, "messages", add_generation_prompt=False)
        added = self._tokenizer.added_tokens_decoder.values()
        return tuple(str(each) for each in added if each.special and str(each) in rendered)

    def render(
        self,
        messages: Sequence[Any],
        field: str,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for messages, each a dict with `role`, and `content` or `tool_calls`.

        Arguments of calls may be JSON texts or objects: the template gets what it takes.

        Args:
            tools: functions that the model may call, each in OpenAI's shape.
            add_generation_prompt: the assistant's turn has begun at the end.
            continue_final_message: the last message has not ended.
            chat_template_kwargs: what the template may ask for beside the messages.

        Raises InvalidInputError naming ``field``, or an option of the call among the kwargs.
        """
        if not messages:
            raise InvalidInputError(field, messages, "is empty; give at least one message")
        if not self.exists:
            raise InvalidInputError(
                field, messages, "the tokenizer has no chat template; send text"
            )
        for name in chat_template_kwargs or {}:
            if name in inspect.signature(self._tokenizer.apply_chat_template).parameters:
                raise InvalidInputError(
                    "chat_template_kwargs",
                    name,
                    "is no variable of the template, but an option of the call",
                )
        checked = [
            self._message(message, f"{field}[{index}]") for index, message in enumerate(messages)
        ]
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        if tools:
            options["tools"] = list(tools)
        try:
            return self._apply(checked, options)
        except _TEMPLATE_ERRORS as error:
            raise InvalidInputError(
                field, messages, f"must suit the chat template, which says: {error}"
            ) from error

    def _apply(self, messages: Sequence[Any], options: Mapping[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)

    def _message(self, message: Any, field: str) -> dict[str, Any]:
        """The message with what templates want of one that makes calls."""
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if (
            not isinstance(message, dict)
            or "role" not in message
            or not ("content" in message or calls)
        ):
            raise InvalidInputError(field, message, "each message needs `role` and `content`")
        if not isinstance(calls, list) or not calls:
            return {name: value for name, value in message.items() if name != "tool_calls"}
        convert = _as_text if self.takes_arguments_as_text else _as_object
        converted = [
            _call(call, convert, f"{field}.tool_calls[{index}].function.arguments")
            for index, call in enumerate(calls)
        ]
        # Many templates join the content to other text, or test a text alone for being empty.
        content = message.get("content")
        return {**message, "content": "" if content is None else content, "tool_calls": converted}


def _call(call: Any, convert: Callable[[Any, str], Any], field: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call  # the template says what is wrong with it
    arguments = convert(function["arguments"], field)
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: Any, field: str) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidInputError(field, arguments, "must be a JSON object")
    return value


def _as_text(arguments: Any, field: str) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    try:
        return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidInputError(field, arguments, "must be a JSON object") from None
