"""`POST /v1/chat/completions`: its body, its route and its answers, whole or in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rollout.errors import InvalidInputError
from rollout.server.body_fields import EVENTS, Listed, check_extra_fields
from rollout.server.openai.answer import (
    Heading,
    OutputTexts,
    finish,
    json_response,
    stream_while_connected,
    usage,
)
from rollout.server.openai.logprobs import LogprobWriter, ScoredTokens, TokenSpelling
from rollout.server.openai.route import OpenAIRoute, require_model
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.server.serving import Serving
from rollout.server.streams import Delta, DeltaStream, EventStream, SampleRequest, while_connected
from rollout.types import Rollout, SamplingParams


class ContentPart(BaseModel):
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


_ROLE = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    heading: Heading
    body: ChatBody
    samples: Sequence[SampleRequest]  # one for each choice
    writer: LogprobWriter
    texts: OutputTexts

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": _ROLE, "content": self._text(rollout), "refusal": None},
                **self._of_tokens(rollout),
                **finish(rollout),
            }
            for index, rollout in enumerate(rollouts)
        ]
        versions = [version for rollout in rollouts for version in rollout.weight_versions]
        return self.heading.over(
            choices, versions, usage=self._usage(rollouts), **self._prompt_fields()
        )

    async def parts(self, deltas: DeltaStream) -> AsyncGenerator[dict[str, Any], None]:
        heading = replace(self.heading, object="chat.completion.chunk")
        texts = [self.texts.stream(self.body, sample.params.stop) for sample in self.samples]
        no_usage = {"usage": None} if self.body.wants_usage else {}
        rollouts: dict[int, Rollout] = {}
        begin = {"role": _ROLE, "content": "", "refusal": None}
        for index in range(len(self.samples)):
            yield heading.over([_part(index, begin)], [], **no_usage, **self._prompt_fields())
        async for delta in deltas:
            text = texts[delta.index].push(delta.token_ids)
            if delta.rollout is not None:
                rollouts[delta.index] = delta.rollout
                text += texts[delta.index].finish(self._text(delta.rollout))
            part = _part(delta.index, {"content": text} if text else {}) | self._of_tokens(delta)
            if delta.rollout is not None:
                part |= finish(delta.rollout)
            elif not (text or self.body.logprobs or self.body.return_token_ids):
                continue
            yield heading.over([part], delta.weight_versions, **no_usage)
        if self.body.wants_usage:
            ended = [rollouts[index] for index in range(len(rollouts))]
            versions = [version for rollout in ended for version in rollout.weight_versions]
            yield heading.over([], versions, usage=self._usage(ended))

    def _text(self, rollout: Rollout) -> str:
        return self.texts.whole(self.body, self.samples[0].params.stop, rollout)

    def _of_tokens(self, tokens: Rollout | Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            fields["logprobs"] = self.writer.of_chat(ScoredTokens.of(tokens))
        if self.body.return_token_ids:
            fields["token_ids"] = list(tokens.token_ids)
        return fields

    def _prompt_fields(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.samples[0].prompt_ids)}

    def _usage(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        return usage([len(self.samples[0].prompt_ids)], rollouts)


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
    texts = OutputTexts(serving.encoder)
    spelling = TokenSpelling(serving.encoder.tokenizer)

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
            writer=LogprobWriter(spelling, bool(body.return_tokens_as_token_ids)),
            texts=texts,
        )
        if body.stream:
            deltas = await stream_while_connected(request, serving, samples)
            return EventStream(answer.parts(deltas), deltas)
        rollouts = await while_connected(request, serving.generate(samples))
        return await json_response(lambda: answer.whole(rollouts))

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
