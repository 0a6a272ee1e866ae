"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from rollout.server.disconnect import while_connected
from rollout.server.documented import EVENTS
from rollout.server.event_stream import EventStream
from rollout.server.openai.answer import Heading, json_response, stream_while_connected
from rollout.server.openai.chat_answer import ChatAnswer
from rollout.server.openai.chat_body import ChatBody
from rollout.server.openai.logprobs import LogprobWriter
from rollout.server.openai.models import require_model
from rollout.server.openai.output_text import OutputTexts
from rollout.server.openai.route import OpenAIRoute
from rollout.server.openai.token_spelling import TokenSpelling
from rollout.server.samples import SampleRequest
from rollout.server.serving import Serving


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
