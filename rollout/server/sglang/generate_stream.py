"""`/generate` with ``stream``: every event says all there is so far, as sglang's do."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import RolloutError
from rollout.server.delta_stream import DeltaStream
from rollout.server.samples import Delta
from rollout.server.serving import Serving
from rollout.server.sglang.generate_answer import AnswerWriter
from rollout.server.sglang.generate_body import GenerateItem
from rollout.server.text_stream import Detokenizer, TextStream
from rollout.types import FinishReason, TokenExtras


class TextStreams:
    """Makes the text streams of samples."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._detokenizers = {
            skips: None if encoder.tokenizer is None else Detokenizer(encoder.tokenizer, skips)
            for skips in (True, False)
        }

    def open(self, question: GenerateItem) -> TextStream:
        return TextStream(self._detokenizers[question.skip_special_tokens], question.params.stop)


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
            _SoFar(question, index, prompt_logprobs, self._texts.open(question))
            for index in range(question.params.n)
        ]

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
