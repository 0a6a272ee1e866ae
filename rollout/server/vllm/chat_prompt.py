"""Chats as token ids: `/v1/chat/completions/render`, and `.../tokens`, which is sent them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from rollout.server.body_fields import EVENTS, KnownIds, Listed
from rollout.server.openai.answer import Heading, OutputTexts
from rollout.server.openai.chat import ChatAnswer, ChatBody
from rollout.server.openai.route import OpenAIRoute, require_model
from rollout.server.openai.sampling_body import SamplingFields
from rollout.server.serving import Serving
from rollout.server.streams import SampleRequest


class TokensBody(ChatBody):
    """A chat whose prompt the client has encoded, and holds the very ids that were sampled."""

    tokens: Annotated[Listed[int], KnownIds, Field(description="the prompt, instead of messages")]


async def chat_prompt_ids(serving: Serving, body: ChatBody) -> list[int]:
    """The prompt that the chat template makes of the body. Raises InvalidInputError."""
    return await asyncio.to_thread(
        serving.encoder.encode_chat,
        body.conversation,
        add_generation_prompt=body.begins_answer,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=body.chat_template_kwargs,
        max_tokens=serving.max_prompt_len,
    )


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=OpenAIRoute)
    texts = OutputTexts(serving.encoder)

    @router.post("/v1/chat/completions/render")
    async def render(body: ChatBody) -> dict[str, Any]:
        """The body that `/inference/v1/generate` takes for this chat; nothing is generated."""
        require_model(serving, body.model)
        body.check_fields()
        prompt_ids = await chat_prompt_ids(serving, body)
        serving.check_prompt_len(len(prompt_ids))
        params = body.params(len(prompt_ids), serving.max_context_len, seed=0)
        sampling = body.model_dump(include=set(SamplingFields.model_fields), exclude_none=True)
        sampling["max_tokens"] = params.max_new_tokens
        if body.logprobs:
            sampling["logprobs"] = params.top_logprobs
        return {
            "request_id": Heading.new("chatcmpl", "", serving.model_name).id,
            "token_ids": prompt_ids,
            "features": None,
            "sampling_params": sampling,
            "model": body.model,
            "stream": bool(body.stream),
            "stream_options": body.stream_options,
            "cache_salt": (body.model_extra or {}).get("cache_salt"),
            "priority": 0,
            "kv_transfer_params": None,
        }

    @router.post("/v1/chat/completions/tokens", responses=EVENTS)
    async def tokens(body: TokensBody, request: Request) -> Response:
        """A chat's answer to a prompt of token ids; the messages are not looked at."""
        require_model(serving, body.model)
        body.check_fields()
        serving.require_batch(body.num_samples, "n")
        (prompt_ids,) = await serving.encode([body.tokens], "tokens")
        params = body.params(len(prompt_ids), serving.max_context_len, serving.fresh_seed())
        answer = ChatAnswer(
            heading=Heading.new("chatcmpl", "chat.completion", serving.model_name),
            body=body,
            samples=[
                SampleRequest(prompt_ids=prompt_ids, params=params, sample_index=index)
                for index in range(body.num_samples)
            ],
            texts=texts,
        )
        return await answer.respond(request, serving)

    return router
