"""SGLang's `/generate`. Each streamed event holds the whole output so far."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request, Response

from rollout.errors import InvalidInputError, RolloutError
from rollout.server.json_route import json_response
from rollout.server.serving import Serving
from rollout.server.sglang.generate_answer import AnswerWriter
from rollout.server.sglang.generate_body import GenerateBody, GenerateItem, generate_items
from rollout.server.streams import Delta, DeltaStream, EventStream, open_stream, while_connected
from rollout.server.text_stream import TextStream, TextStreams
from rollout.types import EmittedTokens, FinishReason, Rollout, SamplingParams, TokenExtras


class _SoFar:
    def __init__(
        self,
        item: GenerateItem,
        sample_index: int,
        prompt_logprobs: dict[str, Any],
        text: TextStream,
    ) -> None:
        self.item = item
        self.sample_index = sample_index
        self.prompt_logprobs = prompt_logprobs
        self.tokens = EmittedTokens()
        self.text = ""
        self._texts = text
        self._num_pushed = 0

    def add(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        # The last token may turn out to be the one that ended it, which is no text.
        token_ids = self.tokens.token_ids
        self.text += self._texts.push(token_ids[self._num_pushed : -1])
        self._num_pushed = max(len(token_ids) - 1, self._num_pushed)


class Generator:
    """Answers sglang's bodies of `/generate`."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._writer = AnswerWriter(serving.encoder, serving.open_update.labels)
        self._texts = TextStreams(serving.encoder.tokenizer)

    async def answer(self, body: GenerateBody, request: Request) -> Response:
        """Tokens and logprobs of one prompt or several, and scores of the prompts' own tokens."""
        started = time.monotonic()
        items, is_single = await generate_items(body, self._serving)
        if body.stream:
            return await self._stream(items, is_single, request, started)
        return await while_connected(request, self._whole(items, is_single, started))

    async def _whole(
        self, items: Sequence[GenerateItem], is_single: bool, started: float
    ) -> Response:
        samples = [sample for item in items for sample in item.samples()]
        rollouts = await self._serving.generate(samples) if samples else []
        if is_single and rollouts and rollouts[0].finish_reason is FinishReason.ERROR:
            raise RolloutError(rollouts[0].error)
        scores = [await self._prompt_logprobs(item) for item in items]
        version = await self._weight_version(rollouts, items)
        seconds = time.monotonic() - started

        def build() -> Any:
            answers: list[dict[str, Any]] = []
            unwritten = iter(rollouts)
            for item, scored in zip(items, scores, strict=True):
                if not item.generates:
                    answers.append(self._writer.scored(item, scored, version, seconds))
                for _ in item.samples():
                    rollout = next(unwritten)
                    answers.append(self._writer.answer(item, rollout, scored, version, seconds))
            return answers[0] if is_single else answers

        return await json_response(build)

    async def _stream(
        self, items: Sequence[GenerateItem], is_single: bool, request: Request, started: float
    ) -> Response:
        if not all(item.generates for item in items):
            raise InvalidInputError(
                "stream", True, "needs max_new_tokens >= 1: scores come all at once"
            )
        scores = [await while_connected(request, self._prompt_logprobs(item)) for item in items]
        samples = [sample for item in items for sample in item.samples()]
        await while_connected(request, self._serving.prepare(samples))
        deltas = await open_stream(request, self._serving.stream(samples))
        so_far = [
            _SoFar(item, index, scored, self._open_text(item))
            for item, scored in zip(items, scores, strict=True)
            for index in range(item.params.n)
        ]
        return EventStream(self._events(deltas, so_far, is_single, started), deltas)

    async def _events(
        self, deltas: DeltaStream, samples: Sequence[_SoFar], is_single: bool, started: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The answers as they grow. Raises RolloutError when the only sample has failed."""
        async for delta in deltas:
            sample, rollout = samples[delta.index], delta.rollout
            sample.add(delta)
            if rollout is None:
                event = self._unfinished(sample)
            elif is_single and rollout.finish_reason is FinishReason.ERROR:
                raise RolloutError(rollout.error)
            else:
                version = await self._weight_version([rollout], [sample.item])
                seconds = time.monotonic() - started
                event = self._writer.answer(
                    sample.item, rollout, sample.prompt_logprobs, version, seconds
                )
            yield event if is_single else {"index": delta.index, **event}

    def _unfinished(self, sample: _SoFar) -> dict[str, Any]:
        item, tokens, writer = sample.item, sample.tokens, self._writer
        ids = tokens.token_ids
        meta = {
            **writer.meta(item, sample.sample_index, tokens.weight_versions, len(ids)),
            **writer.output_logprobs(item, ids, tokens.logprobs, tokens.extras),
            **sample.prompt_logprobs,
        }
        return {"text": sample.text, "output_ids": list(ids), "meta_info": meta}

    def _open_text(self, item: GenerateItem) -> TextStream:
        return self._texts.open(item.skip_special_tokens, item.params.stop)

    async def _prompt_logprobs(self, item: GenerateItem) -> dict[str, Any]:
        """The prompt is scored by the model alone: parameters of sampling do not apply to it."""
        logprobs: list[float] = []
        extras = TokenExtras()
        if item.score_from is not None:
            first = max(item.score_from, 1)
            known, scored = item.prompt_ids[:first], item.prompt_ids[first:]
            if scored:
                params = SamplingParams(
                    top_logprobs=item.params.top_logprobs,
                    logprob_token_ids=item.params.logprob_token_ids,
                )
                logprobs, extras = await self._serving.score(known, scored, params)
        elif not item.generates and len(item.prompt_ids) > 1:
            # Nothing is asked for but that the prompt is in the cache from now on.
            await self._serving.score(item.prompt_ids[:-1], item.prompt_ids[-1:], SamplingParams())
        return self._writer.prompt_logprobs(item, logprobs, extras)

    async def _weight_version(
        self, rollouts: Sequence[Rollout], items: Sequence[GenerateItem]
    ) -> int:
        """The engine's, where an answer has no tokens to tell theirs; else any."""
        if all(rollout.token_ids for rollout in rollouts) and all(item.generates for item in items):
            return 0
        return await self._serving.call(lambda engine: engine.weight_version)
