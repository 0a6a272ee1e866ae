"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rollout.errors import InvalidInputError
from rollout.server.body_fields import Listed
from rollout.server.openai.extra_fields import check_extra_fields
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.types import SamplingParams


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """What else it holds is the chat template's."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | Listed[ContentPart]


_NOT_TEXT = ("tool_calls", "function_call", "audio")  # parts of messages


class ChatBody(OpenAISamplingBody):
    messages: Listed[Message]
    max_completion_tokens: int | None = Field(None, description="default: what the context leaves")
    max_tokens: int | None = Field(None, description="its former name")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError("top_logprobs", self.top_logprobs, "needs logprobs=true")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidInputError(
                "continue_final_message", True, "is for add_generation_prompt=false"
            )
        both = (self.max_completion_tokens, self.max_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidInputError(
                "max_tokens", self.max_tokens, f"differs from max_completion_tokens={both[0]}"
            )

    @property
    def begins_answer(self) -> bool:
        """The prompt ends where the assistant's turn begins."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: each content is one text.

        Raises InvalidInputError naming what is no text.
        """
        return [self._message(index, message) for index, message in enumerate(self.messages)]

    def _message(self, index: int, message: Message) -> dict[str, Any]:
        extra = message.model_extra or {}
        try:
            check_extra_fields({name: extra.get(name) for name in _NOT_TEXT})
        except InvalidInputError as error:
            raise InvalidInputError(
                f"messages[{index}].{error.field}", error.value, error.remedy
            ) from None
        content = message.content
        if not isinstance(content, str):
            content = "\n".join(
                _text(part, f"messages[{index}].content[{place}]")
                for place, part in enumerate(content)
            )
        return {**extra, "role": message.role, "content": content}

    def params(self, prompt_len: int, max_context_len: int, seed: int) -> SamplingParams:
        """Raises InvalidInputError naming the field."""
        asked = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return self.sampling_params(
            max_tokens=max(1, max_context_len - prompt_len) if asked is None else asked,
            seed=seed,
            top_logprobs=self.top_logprobs or 0,
        )


def _text(part: ContentPart, field: str) -> str:
    if part.type != "text" or part.text is None:
        raise InvalidInputError(field, part.type, "messages may hold text alone")
    return part.text
