"""What `POST /v1/completions` answers, whole or in parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.server.delta_stream import DeltaStream
from rollout.server.openai.answer import Heading, finish, usage
from rollout.server.openai.completion_body import CompletionBody
from rollout.server.openai.echo import Echo
from rollout.server.openai.logprobs import NO_TOKENS, LogprobWriter, ScoredTokens, TextOffsets
from rollout.server.openai.output_text import OutputTexts
from rollout.server.samples import SampleRequest
from rollout.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer:
    heading: Heading
    body: CompletionBody
    samples: Sequence[SampleRequest]  # one for each choice
    echoes: Sequence[Echo]  # by prompt; empty where prompts are not echoed
    writer: LogprobWriter
    texts: OutputTexts

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        choices = [
            _Choice(self, index).part(self._text(index, rollout), ScoredTokens.of(rollout), rollout)
            for index, rollout in enumerate(rollouts)
        ]
        versions = [version for rollout in rollouts for version in rollout.weight_versions]
        return self.heading.over(choices, versions, usage=self._usage(rollouts))

    def of_prompts(self) -> dict[str, Any]:
        """Where nothing is generated."""
        choices = [
            {**_Choice(self, index).part("", NO_TOKENS, None), "finish_reason": "length"}
            for index in range(len(self.samples))
        ]
        return self.heading.over(choices, [], usage=self._usage([]))

    async def parts(self, deltas: DeltaStream) -> AsyncGenerator[dict[str, Any], None]:
        choices = [_Choice(self, index) for index in range(len(self.samples))]
        texts = [self.texts.stream(self.body, sample.params.stop) for sample in self.samples]
        no_usage = {"usage": None} if self.body.wants_usage else {}
        rollouts: dict[int, Rollout] = {}
        async for delta in deltas:
            text = texts[delta.index].push(delta.token_ids)
            if delta.rollout is not None:
                rollouts[delta.index] = delta.rollout
                text += texts[delta.index].finish(self._text(delta.index, delta.rollout))
            part = choices[delta.index].part(text, ScoredTokens.of(delta), delta.rollout)
            if self._says_something(part):
                yield self.heading.over([part], delta.weight_versions, **no_usage)
        if self.body.wants_usage:
            ended = [rollouts[index] for index in range(len(rollouts))]
            versions = [version for rollout in ended for version in rollout.weight_versions]
            yield self.heading.over([], versions, usage=self._usage(ended))

    def _text(self, index: int, rollout: Rollout) -> str:
        return self.texts.whole(self.body, self.samples[index].params.stop, rollout)

    def _says_something(self, part: dict[str, Any]) -> bool:
        return bool(part["text"] or part["logprobs"] or part["finish_reason"]) or bool(
            self.body.return_token_ids
        )

    def _usage(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        firsts = self.samples[:: self.body.num_samples]
        return usage([len(sample.prompt_ids) for sample in firsts], rollouts)


class _Choice:
    """One choice of an answer, written in one part or in many."""

    def __init__(self, answer: CompletionAnswer, index: int) -> None:
        sample = answer.samples[index]
        self._answer = answer
        self._detokenizer = answer.texts.detokenizer(answer.body)
        self._index = index
        self._prompt_ids = sample.prompt_ids
        self._echo = answer.echoes[sample.prompt_index] if answer.echoes else None
        echo_len = 0 if self._echo is None else len(self._echo.text)
        self._offsets = TextOffsets(self._detokenizer, echo_len)
        self._begun = False

    def part(self, text: str, tokens: ScoredTokens, ended: Rollout | None) -> dict[str, Any]:
        """``tokens``: those since the last part; ``text``: what may be shown by now."""
        body = self._answer.body
        choice = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}
        if body.return_token_ids:
            choice["token_ids"] = list(tokens.token_ids)
            if not self._begun:
                choice["prompt_token_ids"] = list(self._prompt_ids)
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs(tokens)
        if self._echo is not None and not self._begun:
            choice["text"] = self._echo.text + text
        self._begun = True
        return choice if ended is None else {**choice, **finish(ended)}

    def _logprobs(self, tokens: ScoredTokens) -> dict[str, Any]:
        offsets = self._offsets.push(tokens.token_ids)
        if self._echo is not None and self._echo.tokens is not None and not self._begun:
            of_prompt = TextOffsets(self._detokenizer).push(self._prompt_ids)
            tokens, offsets = self._echo.tokens.then(tokens), of_prompt + offsets
        return self._answer.writer.of_completion(tokens, offsets)
