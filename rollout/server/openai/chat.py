"""`POST /v1/chat/completions`: its route and its answers, whole or in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from rollout.server.body_fields import EVENTS
from rollout.server.openai.answer import (
    Answer,
    Heading,
    OutputTexts,
    WritePart,
    sampling_mask,
)
from rollout.server.openai.chat_body import ChatBody
from rollout.server.openai.chat_format import ChatFormat, MessageFormat
from rollout.server.openai.logprobs import ScoredTokens
from rollout.server.openai.message_reader import MessagePart, MessageReader
from rollout.server.openai.prompt_logprobs import PromptLogprobs, prompt_logprobs
from rollout.server.openai.route import OpenAIRoute
from rollout.server.serving import Serving
from rollout.server.sglang.meta_info import MetaInfoOptions, MetaInfoWriter
from rollout.server.streams import Delta, SampleRequest, while_connected
from rollout.types import EmittedTokens, FinishReason, Rollout

_ROLE = "assistant"


@dataclass(frozen=True, kw_only=True)
class ChatAnswer(Answer[ChatBody]):
    format: MessageFormat
    meta_writer: MetaInfoWriter
    prompt_logprobs: PromptLogprobs | None  # None: they are not asked for

    def choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        reader = self.format.open()
        part = reader.finish(self.text(index, rollout))
        message: dict[str, Any] = {"role": _ROLE, "content": part.content, "refusal": None}
        if part.calls:
            message["content"] = part.content or None
            message["tool_calls"] = [self.format.write_call(call) for call in part.calls]
        if self.format.reads_reasoning:
            message["reasoning_content"] = part.reasoning or None
        choice = {
            "index": index,
            "message": message,
            **self.of_tokens(rollout),
            **self.ending(index, rollout, reader),
        }
        if self.body.return_prompt_token_ids:
            choice["prompt_token_ids"] = list(rollout.prompt_ids)
        if self.body.return_meta_info:
            choice["meta_info"] = self._meta_info(index, rollout)
        return choice

    def _meta_info(self, index: int, rollout: Rollout) -> dict[str, Any]:
        sample, body = self.samples[index], self.body
        asked = MetaInfoOptions(
            rid=body.rid or self.heading.id,
            prompt_ids=sample.prompt_ids,
            params=sample.params,
            return_logprob=bool(body.logprobs),
        )
        return self.meta_writer.meta_info(asked, rollout, weight_version=0)

    @property
    def part_heading(self) -> Heading:
        return replace(self.heading, object="chat.completion.chunk")

    def openings(self) -> list[dict[str, Any]]:
        begin = {"role": _ROLE, "content": "", "refusal": None}
        return [_part(index, begin) for index in range(len(self.samples))]

    def answer_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(self.samples[0].prompt_ids)
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        return fields

    def part_writers(self) -> list[WritePart]:
        return [_PartWriter(self).next_part for _ in self.samples]

    def ending(self, index: int, rollout: Rollout, reader: MessageReader) -> dict[str, Any]:
        fields = self.finish(index, rollout)
        if reader.num_calls and rollout.finish_reason is FinishReason.STOP:
            fields["finish_reason"] = "tool_calls"
        return fields

    def of_tokens(self, tokens: EmittedTokens) -> dict[str, Any]:
        """The fields of a choice that are about its tokens."""
        fields: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            fields["logprobs"] = self.writer.of_chat(ScoredTokens.of(tokens))
        if self.body.return_token_ids:
            fields["token_ids"] = list(tokens.token_ids)
        return fields | sampling_mask(tokens, self.body.return_sampling_mask)


class _PartWriter:
    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._reader = answer.format.open()

    def next_part(self, text: str, delta: Delta) -> dict[str, Any] | None:
        """None if the part would say nothing."""
        answer, rollout = self._answer, delta.rollout
        num_before = self._reader.num_calls
        message = self._reader.push(text) if rollout is None else self._reader.finish(text)
        part = _part(delta.index, self._delta(message, num_before)) | answer.of_tokens(delta.tokens)
        if rollout is not None:
            return part | answer.ending(delta.index, rollout, self._reader)
        body = answer.body
        is_told = body.logprobs or body.return_token_ids or body.return_sampling_mask
        return part if message or is_told else None

    def _delta(self, message: MessagePart, num_before: int) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if message.reasoning:
            delta["reasoning_content"] = message.reasoning
        if message.content:
            delta["content"] = message.content
        if message.calls:
            delta["tool_calls"] = [
                {"index": index, **self._answer.format.write_call(call)}
                for index, call in enumerate(message.calls, start=num_before)
            ]
        return delta


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": index, "delta": delta, "logprobs": None,
        "finish_reason": None, "matched_stop": None, "stop_reason": None,
    }  # fmt: skip


class ChatResponder:
    def __init__(self, serving: Serving) -> None:
        self.format = ChatFormat(serving)
        self._serving = serving
        self._texts = OutputTexts(serving.encoder)
        self._meta_writer = MetaInfoWriter(serving.encoder, serving.open_update.labels)

    async def answer(
        self,
        body: ChatBody,
        request: Request,
        prompt_ids: Sequence[int],
        message_format: MessageFormat,
    ) -> Response:
        """Generate the samples of an encoded prompt, and answer as the body asks.

        Raises InvalidInputError naming the field that is wrong.
        """
        serving = self._serving
        params = body.params(
            len(prompt_ids),
            serving.max_context_len,
            serving.fresh_seed(),
            message_format.grammar_after,
        )
        scored = None
        if body.prompt_logprobs is not None:
            scoring = prompt_logprobs(
                serving, prompt_ids, params, body.prompt_logprobs, self._texts.spelling
            )
            scored = await while_connected(request, scoring)
        answer = ChatAnswer(
            heading=Heading.new("chatcmpl", "chat.completion", serving.model_name, body.request_id),
            body=body,
            samples=[
                SampleRequest(prompt_ids=prompt_ids, params=params, sample_index=index)
                for index in range(body.num_samples)
            ],
            texts=self._texts,
            labels=serving.open_update.labels,
            format=message_format,
            meta_writer=self._meta_writer,
            prompt_logprobs=scored,
            shown_ids=self._texts.streams.special_ids(message_format.markers),
        )
        return await answer.respond(request, serving)


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
    responder = ChatResponder(serving)

    @router.post("/v1/chat/completions", responses=EVENTS)
    async def chat(body: ChatBody, request: Request) -> Response:
        """The messages become a prompt by the tokenizer's chat template."""
        serving.require_model(body.model)
        body.check_fields()
        serving.require_batch(body.num_samples, "n")
        chat_format = responder.format
        rendered = await asyncio.to_thread(chat_format.render, body)
        message_format = chat_format.message_format(body, rendered)
        prompt_ids = await asyncio.to_thread(chat_format.encode, body, rendered)
        return await responder.answer(body, request, prompt_ids, message_format)

    return router
