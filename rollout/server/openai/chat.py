"""`POST /v1/chat/completions`: its body, its route and its answers, whole or in parts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rollout.errors import InvalidInputError
from rollout.server.body_fields import EVENTS, Listed, refuse_unknown
from rollout.server.openai.answer import Answer, Heading, OutputTexts, WritePart, finish
from rollout.server.openai.logprobs import ScoredTokens
from rollout.server.openai.route import OpenAIRoute, require_model
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.server.serving import Serving
from rollout.server.streams import Delta, SampleRequest
from rollout.types import Rollout, SamplingParams


class ContentPart(BaseModel):
    """One of several contents of a message."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """One chat message; its other fields are for the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | Listed[ContentPart]


_NOT_TEXT = ("tool_calls", "function_call", "audio")  # parts of messages


class ChatBody(OpenAISamplingBody):
    """Messages, to be answered by the assistant."""

    messages: Listed[Message]
    max_completion_tokens: int | None = Field(None, description="default: what the context leaves")
    max_tokens: int | None = Field(None, description="its former name")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_fields(self) -> None:
        """Raises InvalidInputError also for fields of chats that exclude each other."""
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
        unanswerable = {name: extra.get(name) for name in _NOT_TEXT}
        refuse_unknown(unanswerable, frozenset(), f"messages[{index}].")
        content = message.content
        if not isinstance(content, str):
            content = "\n".join(
                _text(part, f"messages[{index}].content[{position}]")
                for position, part in enumerate(content)
            )
        return {**extra, "role": message.role, "content": content}

    def params(self, prompt_len: int, max_context_len: int, seed: int) -> SamplingParams:
        """The engine's sampling parameters. Raises InvalidInputError naming the field."""
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


_ROLE = "assistant"


@dataclass(frozen=True, kw_only=True)
class ChatAnswer(Answer[ChatBody]):
    """One message of the assistant for each sample."""

    def choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        content = self.text(index, rollout)
        return {
            "index": index,
            "message": {"role": _ROLE, "content": content, "refusal": None},
            **self._of_tokens(rollout),
            **finish(rollout),
        }

    @property
    def part_heading(self) -> Heading:
        return replace(self.heading, object="chat.completion.chunk")

    def openings(self) -> list[dict[str, Any]]:
        begin = {"role": _ROLE, "content": "", "refusal": None}
        return [_part(index, begin) for index in range(len(self.samples))]

    def answer_fields(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.samples[0].prompt_ids)}

    def part_writers(self) -> list[WritePart]:
        return [self._next_part] * len(self.samples)

    def _next_part(self, text: str, delta: Delta) -> dict[str, Any] | None:
        part = _part(delta.index, {"content": text} if text else {}) | self._of_tokens(delta)
        if delta.rollout is not None:
            return part | finish(delta.rollout)
        return part if text or self.body.logprobs or self.body.return_token_ids else None

    def _of_tokens(self, tokens: Rollout | Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            fields["logprobs"] = self.writer.of_chat(ScoredTokens.of(tokens))
        if self.body.return_token_ids:
            fields["token_ids"] = list(tokens.token_ids)
        return fields


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
    texts = OutputTexts(serving.encoder)

    @router.post("/v1/chat/completions", responses=EVENTS)
    async def chat(body: ChatBody, request: Request) -> Response:
        """The messages become a prompt by the tokenizer's chat template."""
        require_model(serving, body.model)
        body.check_fields()
        serving.require_batch(body.num_samples, "n")
        samples = await _samples(serving, body)
        answer = ChatAnswer(
            heading=Heading.new("chatcmpl", "chat.completion", serving.model_name),
            body=body,
            samples=samples,
            texts=texts,
        )
        return await answer.respond(request, serving)

    return router


async def _samples(serving: Serving, body: ChatBody) -> list[SampleRequest]:
    prompt_ids = await asyncio.to_thread(
        serving.encoder.encode_chat,
        body.conversation,
        add_generation_prompt=body.begins_answer,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
        max_tokens=serving.max_prompt_len,
    )
    params = body.params(len(prompt_ids), serving.max_context_len, serving.fresh_seed())
    return [
        SampleRequest(prompt_ids=prompt_ids, params=params, sample_index=index)
        for index in range(body.num_samples)
    ]
