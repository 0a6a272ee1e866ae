"""Chats as token ids: `/v1/chat/completions/render`, and `.../tokens`, which is sent them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from rollout.errors import InvalidInputError
from rollout.server.body_fields import EVENTS, Listed
from rollout.server.openai.answer import Heading
from rollout.server.openai.chat import ChatResponder
from rollout.server.openai.chat_body import ChatBody
from rollout.server.openai.chat_format import ChatFormat
from rollout.server.openai.output_grammar import GrammarBody
from rollout.server.openai.route import OpenAIRoute
from rollout.server.openai.sampling_body import SamplingFields
from rollout.server.serving import Serving

_PLAIN_FIELDS = SamplingFields.model_fields.keys() - GrammarBody.model_fields.keys()
_STRUCTURED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


class TokensBody(ChatBody):
    """A chat whose prompt the client has encoded, and holds the very ids that were sampled."""

    tokens: Listed[int] = Field(description="the prompt, instead of messages")

    def begun(self) -> ChatBody:
        """The body of a chat whose prompt ends where the assistant's turn begins, or within it."""
        return self.model_copy(
            update={"add_generation_prompt": True, "continue_final_message": False}
        )


async def chat_prompt(chat_format: ChatFormat, body: ChatBody) -> tuple[str, list[int]]:
    """The prompt that the chat template makes of the body, as text and as token ids. Raises
    InvalidInputError."""

    def encode() -> tuple[str, list[int]]:
        # The client parses calls itself, so any call format will do.
        rendered = chat_format.render(body.model_copy(update={"tool_choice": "none"}))
        return rendered, chat_format.encode(body, rendered)

    return await asyncio.to_thread(encode)


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=OpenAIRoute)
    responder = ChatResponder(serving)

    @router.post("/v1/chat/completions/render")
    async def render(body: ChatBody) -> dict[str, Any]:
        """The body that `/inference/v1/generate` takes for this chat; nothing is generated."""
        serving.require_model(body.model)
        body.check_fields()
        rendered, prompt_ids = await chat_prompt(responder.format, body)
        after = responder.format.message_format(body, rendered).grammar_after
        serving.check_prompt_len(len(prompt_ids))
        params = body.params(len(prompt_ids), serving.max_context_len, seed=0)
        sampling = body.model_dump(include=_PLAIN_FIELDS, exclude_none=True)
        sampling["max_tokens"] = params.max_new_tokens
        if body.grammar is not None:  # that of a forced call has no other field
            kind, value = body.grammar
            sampling["structured_outputs"] = {_STRUCTURED[kind]: value}
            if after is not None:
                sampling["grammar_after"] = after
        if body.logprobs:
            sampling["logprobs"] = params.top_logprobs
        return {
            "request_id": Heading.new("chatcmpl", "", serving.model_name, body.request_id).id,
            "token_ids": prompt_ids,
            "features": None,
            "sampling_params": sampling,
            "model": body.model,
            "stream": bool(body.stream),
            "stream_options": body.stream_options,
            "cache_salt": (body.model_extra or {}).get("cache_salt"),
            "priority": 0,
            "kv_transfer_params": None,
            **{f"return_{name}": True for name, wanted in body.asked_of_tokens.items() if wanted},
        }

    @router.post("/v1/chat/completions/tokens", responses=EVENTS)
    async def tokens(body: TokensBody, request: Request) -> Response:
        """A chat's answer to a prompt of token ids; the messages are not looked at."""
        serving.require_model(body.model)
        body.check_fields()
        serving.require_batch(body.num_samples, "n")
        (prompt_ids,) = await serving.encode([body.tokens], "tokens")
        encoder = serving.encoder
        prompt = "" if encoder.tokenizer is None else encoder.decode_with_specials(prompt_ids)
        message_format = responder.format.message_format(body.begun(), prompt)
        if body.wants_calls and message_format.tool_parser is None:
            raise InvalidInputError(
                "tools", body.tools, "it is not known how the model writes calls: see tool_parser"
            )
        return await responder.answer(body, request, prompt_ids, message_format)

    return router
