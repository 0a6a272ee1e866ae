"""`POST /generate`: the call every client of sglang makes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from rollout.server.disconnect import while_connected
from rollout.server.samples import Sample
from rollout.server.serving import Serving
from rollout.types import SamplingParams


class GenerateBody(BaseModel):
    input_ids: list[int]
    sampling_params: dict[str, Any] = Field(default_factory=dict)


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["sglang"])

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> JSONResponse:
        params = SamplingParams(**{"seed": serving.fresh_seed()} | body.sampling_params)
        (prompt_ids,) = await serving.encode([body.input_ids], "input_ids")
        samples = [Sample(prompt_ids=prompt_ids, params=params)]
        (rollout,) = await while_connected(request, serving.generate(samples))
        return JSONResponse({"text": rollout.text, "output_ids": rollout.token_ids})

    return router
