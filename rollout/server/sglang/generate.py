"""`/generate`: the call every client of sglang makes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from rollout.errors import InvalidInputError, RolloutError
from rollout.server.disconnect import while_connected
from rollout.server.documented import EVENTS
from rollout.server.event_stream import EventStream
from rollout.server.json_answer import json_bytes
from rollout.server.json_route import JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.generate_answer import AnswerWriter
from rollout.server.sglang.generate_body import GenerateBody, GenerateItem, generate_items
from rollout.server.sglang.generate_stream import AnswerStream, TextStreams
from rollout.types import FinishReason, Rollout, SamplingParams, TokenExtras


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["sglang"], route_class=JsonRoute)
    generator = _Generator(serving)

    @router.post("/generate", responses=EVENTS)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Tokens and logprobs of one prompt or several, and scores of the prompts' own tokens."""
        started = time.monotonic()
        questions, is_single = await generate_items(body, serving)
        if body.stream:
            return await generator.stream(questions, is_single, request, started)
        return await while_connected(request, generator.whole(questions, is_single, started))

    return router


class _Generator:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._writer = AnswerWriter(serving.encoder)
        self._texts = TextStreams(serving.encoder)

    async def whole(
        self, questions: Sequence[GenerateItem], is_single: bool, started: float
    ) -> Response:
        samples = [sample for question in questions for sample in question.samples()]
        rollouts = await self._serving.generate(samples) if samples else []
        if is_single and rollouts and rollouts[0].finish_reason is FinishReason.ERROR:
            raise RolloutError(rollouts[0].error)
        scores = [await self._prompt_logprobs(question) for question in questions]
        version = await self._weight_version(rollouts, questions)
        seconds = time.monotonic() - started

        def write() -> bytes:
            answers: list[dict[str, Any]] = []
            unwritten = iter(rollouts)
            for question, scored in zip(questions, scores, strict=True):
                if not question.generates:
                    answers.append(self._writer.scored(question, scored, version, seconds))
                for _ in question.samples():
                    rollout = next(unwritten)
                    answers.append(self._writer.answer(question, rollout, scored, version, seconds))
            return json_bytes(answers[0] if is_single else answers)

        # Decoding the text of many samples takes long, and lets other threads run.
        return Response(await asyncio.to_thread(write), media_type="application/json")

    async def stream(
        self, questions: Sequence[GenerateItem], is_single: bool, request: Request, started: float
    ) -> Response:
        if not all(question.generates for question in questions):
            raise InvalidInputError(
                "stream", True, "needs max_new_tokens >= 1: scores come all at once"
            )
        scores = [
            await while_connected(request, self._prompt_logprobs(question))
            for question in questions
        ]
        deltas = self._serving.stream([s for question in questions for s in question.samples()])
        try:
            await while_connected(request, deltas.ready())  # so that errors have their status
        except BaseException:
            await deltas.aclose()
            raise
        answers = AnswerStream(deltas, self._writer, self._texts)
        for question, scored in zip(questions, scores, strict=True):
            answers.expect(question, scored)
        return EventStream(answers.events(self._serving, is_single, started), deltas)

    async def _prompt_logprobs(self, question: GenerateItem) -> dict[str, Any]:
        """By the model alone: what the parameters do to the samples is not done to the prompt."""
        logprobs: list[float] = []
        extras = TokenExtras()
        if question.score_from is not None:
            first = max(question.score_from, 1)
            known, scored = question.prompt_ids[:first], question.prompt_ids[first:]
            if scored:
                params = SamplingParams(top_logprobs=question.params.top_logprobs)
                logprobs, extras = await self._serving.score(known, scored, params)
        return self._writer.prompt_logprobs(question, logprobs, extras)

    async def _weight_version(
        self, rollouts: Sequence[Rollout], questions: Sequence[GenerateItem]
    ) -> int:
        """The engine's, where an answer has no tokens to tell theirs; else any."""
        if all(r.token_ids for r in rollouts) and all(q.generates for q in questions):
            return 0
        return await self._serving.call(lambda engine: engine.weight_version)
