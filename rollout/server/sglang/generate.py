"""`/generate`: the call every client of sglang makes. Streamed events say all so far."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from rollout.errors import InvalidInputError, RolloutError
from rollout.server.body_fields import EVENTS
from rollout.server.json_route import JsonRoute, json_response
from rollout.server.serving import Serving
from rollout.server.sglang.generate_answer import AnswerWriter
from rollout.server.sglang.generate_body import GenerateBody, GenerateItem, generate_items
from rollout.server.streams import Delta, DeltaStream, EventStream, open_stream, while_connected
from rollout.server.text_stream import TextStream, TextStreams
from rollout.types import FinishReason, Rollout, SamplingParams, TokenExtras


class _SoFar:
    """One sample, until it ends."""

    def __init__(
        self,
        question: GenerateItem,
        sample_index: int,
        prompt_logprobs: dict[str, Any],
        text: TextStream,
    ) -> None:
        self.question = question
        self.sample_index = sample_index
        self.prompt_logprobs = prompt_logprobs
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.weight_versions: list[int] = []
        self.extras = TokenExtras()
        self.text = ""
        self._texts = text
        self._num_pushed = 0

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.weight_versions += delta.weight_versions
        self.extras.top_logprobs += delta.extras.top_logprobs
        # The last token may turn out to be the one that ended it, which is no text.
        self.text += self._texts.push(self.token_ids[self._num_pushed : -1])
        self._num_pushed = max(len(self.token_ids) - 1, self._num_pushed)


class AnswerStream:
    """The answers to several questions as they grow."""

    def __init__(self, deltas: DeltaStream, writer: AnswerWriter, texts: TextStreams) -> None:
        self._deltas, self._writer, self._texts = deltas, writer, texts
        self._samples: list[_SoFar] = []  # in the order of the deltas' indices

    def expect(self, question: GenerateItem, prompt_logprobs: dict[str, Any]) -> None:
        self._samples += [
            _SoFar(question, index, prompt_logprobs, self._open_text(question))
            for index in range(question.params.n)
        ]

    def _open_text(self, question: GenerateItem) -> TextStream:
        return self._texts.open(question.skip_special_tokens, question.params.stop)

    async def events(
        self, serving: Serving, is_single: bool, started: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Raises RolloutError when the only sample has failed."""
        async for delta in self._deltas:
            sample, rollout = self._samples[delta.index], delta.rollout
            sample.add(delta)
            if rollout is None:
                event = self._unfinished(sample)
            elif is_single and rollout.finish_reason is FinishReason.ERROR:
                raise RolloutError(rollout.error)
            else:
                version = 0
                if not rollout.token_ids:
                    version = await serving.call(lambda engine: engine.weight_version)
                event = self._writer.answer(
                    sample.question,
                    rollout,
                    sample.prompt_logprobs,
                    version,
                    time.monotonic() - started,
                )
            yield event if is_single else {"index": delta.index, **event}

    def _unfinished(self, sample: _SoFar) -> dict[str, Any]:
        question, writer = sample.question, self._writer
        meta = {
            **writer.meta(
                question, sample.sample_index, sample.weight_versions, len(sample.token_ids)
            ),
            **writer.output_logprobs(question, sample.token_ids, sample.logprobs, sample.extras),
            **sample.prompt_logprobs,
        }
        return {"text": sample.text, "output_ids": list(sample.token_ids), "meta_info": meta}


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
        self._texts = TextStreams(serving.encoder.tokenizer)

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

        def build() -> Any:
            answers: list[dict[str, Any]] = []
            unwritten = iter(rollouts)
            for question, scored in zip(questions, scores, strict=True):
                if not question.generates:
                    answers.append(self._writer.scored(question, scored, version, seconds))
                for _ in question.samples():
                    rollout = next(unwritten)
                    answers.append(self._writer.answer(question, rollout, scored, version, seconds))
            return answers[0] if is_single else answers

        return await json_response(build)

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
        samples = [sample for question in questions for sample in question.samples()]
        deltas = await open_stream(request, self._serving.stream(samples))
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
