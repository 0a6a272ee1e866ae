"""`POST /generate`: sglang's call, and vLLM's former one of the same path."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Tag

from rollout.server.body_fields import EVENTS
from rollout.server.json_route import JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.generate import Generator
from rollout.server.sglang.generate_body import GenerateBody
from rollout.server.vllm.prompt_generate import PromptBody, answer_prompt


def _kind(body: Any) -> str:
    has_prompt = isinstance(body, PromptBody) or (isinstance(body, dict) and "prompt" in body)
    return "PromptBody" if has_prompt else "GenerateBody"


AnyGenerateBody = Annotated[
    Annotated[GenerateBody, Tag("GenerateBody")] | Annotated[PromptBody, Tag("PromptBody")],
    Discriminator(_kind),
]


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["sglang"], route_class=JsonRoute)
    generator = Generator(serving)

    @router.post("/generate", responses=EVENTS)
    async def generate(body: AnyGenerateBody, request: Request) -> Response:
        """Tokens and logprobs of one prompt or several, and scores of the prompts' own tokens.

        A body with ``prompt`` is vLLM's.
        """
        if isinstance(body, PromptBody):
            return await answer_prompt(serving, body, request)
        return await generator.answer(body, request)

    return router
