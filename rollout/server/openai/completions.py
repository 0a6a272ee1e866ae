"""`POST /v1/completions`: its body, its route and its answers, whole or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter, Request, Response

from rollout.errors import InvalidInputError
from rollout.server.body_fields import EVENTS, Listed
from rollout.server.json_route import json_response
from rollout.server.openai.answer import (
    Answer,
    Heading,
    OutputTexts,
    WritePart,
    sampling_mask,
)
from rollout.server.openai.logprobs import NO_TOKENS, ScoredTokens, TextOffsets
from rollout.server.openai.prompt_logprobs import (
    NumPromptLogprobs,
    PromptLogprobs,
    prompt_logprobs,
    score_prompt,
)
from rollout.server.openai.route import OpenAIRoute
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.server.serving import Serving
from rollout.server.streams import Delta, SampleRequest, while_connected
from rollout.types import Rollout, SamplingParams

_DEFAULT_MAX_TOKENS = 16


class CompletionBody(OpenAISamplingBody):
    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    max_tokens: int | None = None  # 0 with echo: score the prompt
    logprobs: int | bool | None = None  # true: 1
    prompt_logprobs: NumPromptLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several: texts or token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        """The most likely tokens of each position to tell; None: no logprobs at all."""
        if isinstance(self.logprobs, bool):
            return 1 if self.logprobs else None
        return self.logprobs

    @property
    def only_scores(self) -> bool:
        """Whether only the prompt's own logprobs are asked for, and nothing is generated."""
        return self.max_tokens == 0 and bool(self.echo)

    def check_fields(self) -> None:
        """Raises InvalidInputError also for fields of completions that exclude each other."""
        super().check_fields()
        if not self.prompts:
            raise InvalidInputError("prompt", self.prompt, "is empty; give at least one")
        if self.best_of not in (None, self.num_samples):
            raise InvalidInputError("best_of", self.best_of, "must equal n, or be left out")
        if self.only_scores and self.stream:
            raise InvalidInputError("stream", True, "nothing is generated with max_tokens=0")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidInputError("prompt_logprobs", self.prompt_logprobs, "needs stream=false")
        if self.logprob_token_ids and self.num_logprobs is None:
            raise InvalidInputError("logprob_token_ids", self.logprob_token_ids, "needs logprobs")
        if self.suffix:
            raise InvalidInputError("suffix", self.suffix, "this server only continues prompts")

    def params(self, seed: int) -> SamplingParams:
        """The engine's sampling parameters. Raises InvalidInputError naming the field."""
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(
            max_tokens=1 if self.only_scores else max_tokens,
            seed=seed,
            top_logprobs=self.num_logprobs or 0,
            **self.asked_of_tokens,
        )


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as an answer repeats it."""

    text: str
    tokens: ScoredTokens | None  # where logprobs are asked for


@dataclass(frozen=True, kw_only=True)
class CompletionAnswer(Answer[CompletionBody]):
    """One text completion for each sample of each prompt."""

    echoes: Sequence[Echo]  # by prompt; empty where prompts are not echoed
    prompt_logprobs: Sequence[PromptLogprobs]  # by prompt; empty where they are not asked for

    def choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        tokens = ScoredTokens.of(rollout)
        part = _Choice(self, index).part(self.text(index, rollout), tokens, rollout)
        return part | sampling_mask(rollout, self.body.return_sampling_mask)

    def part_writers(self) -> list[WritePart]:
        return [_Choice(self, index).next_part for index in range(len(self.samples))]

    def of_prompts(self) -> dict[str, Any]:
        """The answer where nothing is generated."""
        choices = [
            {**_Choice(self, index).part("", NO_TOKENS, None), "finish_reason": "length"}
            for index in range(len(self.samples))
        ]
        return self.heading.over(choices, [], usage=self.usage([]))


class _Choice:
    def __init__(self, answer: CompletionAnswer, index: int) -> None:
        sample = answer.samples[index]
        self._answer = answer
        self._detokenizer = answer.texts.streams.detokenizer(answer.body.skips_special_tokens)
        self._index = index
        self._prompt_ids = sample.prompt_ids
        self._echo = answer.echoes[sample.prompt_index] if answer.echoes else None
        of_prompts = answer.prompt_logprobs
        self._prompt_logprobs = of_prompts[sample.prompt_index] if of_prompts else None
        echo_len = 0 if self._echo is None else len(self._echo.text)
        self._offsets = TextOffsets(self._detokenizer, echo_len)
        self._begun = False

    def next_part(self, text: str, delta: Delta) -> dict[str, Any] | None:
        """None if the part would say nothing."""
        part = self.part(text, ScoredTokens.of(delta.tokens), delta.rollout)
        mask = sampling_mask(delta.tokens, self._answer.body.return_sampling_mask)
        says_something = part["text"] or part["logprobs"] or part["finish_reason"] or mask
        return part | mask if says_something or self._answer.body.return_token_ids else None

    def part(self, text: str, tokens: ScoredTokens, ended: Rollout | None) -> dict[str, Any]:
        """``tokens``: those since the last part; ``text``: what may be shown by now."""
        body = self._answer.body
        choice = {
            "index": self._index, "text": text, "logprobs": None,
            "finish_reason": None, "matched_stop": None, "stop_reason": None,
        }  # fmt: skip
        if body.return_token_ids:
            choice["token_ids"] = list(tokens.token_ids)
            if not self._begun:
                choice["prompt_token_ids"] = list(self._prompt_ids)
        if self._prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs
        if body.num_logprobs is not None:
            choice["logprobs"] = self._logprobs(tokens)
        if self._echo is not None and not self._begun:
            choice["text"] = self._echo.text + text
        self._begun = True
        return choice if ended is None else {**choice, **self._answer.finish(self._index, ended)}

    def _logprobs(self, tokens: ScoredTokens) -> dict[str, Any]:
        offsets = self._offsets.push(tokens.token_ids)
        if self._echo is not None and self._echo.tokens is not None and not self._begun:
            of_prompt = TextOffsets(self._detokenizer).push(self._prompt_ids)
            tokens, offsets = self._echo.tokens.then(tokens), of_prompt + offsets
        return self._answer.writer.of_completion(tokens, offsets)


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
    texts = OutputTexts(serving.encoder)

    @router.post("/v1/completions", responses=EVENTS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The samples of each prompt one after the other, the prompts in their order."""
        serving.require_model(body.model)
        body.check_fields()
        serving.require_batch(body.num_samples * len(body.prompts), "n")
        samples = await _samples(serving, body)
        answer = CompletionAnswer(
            heading=Heading.new("cmpl", "text_completion", serving.model_name, body.request_id),
            body=body,
            samples=samples,
            echoes=await while_connected(request, _echoes(serving, body, samples)),
            prompt_logprobs=await while_connected(
                request, _prompt_logprobs(serving, body, samples, texts)
            ),
            texts=texts,
            labels=serving.open_update.labels,
        )
        if body.only_scores:
            return await json_response(answer.of_prompts)
        return await answer.respond(request, serving)

    return router


async def _samples(serving: Serving, body: CompletionBody) -> list[SampleRequest]:
    params = body.params(serving.fresh_seed())
    prompts = await serving.encode(
        body.prompts, "prompt", add_special_tokens=body.add_special_tokens is not False
    )
    return [
        SampleRequest(
            prompt_ids=prompt_ids,
            params=params,
            prompt_index=prompt_index,
            sample_index=sample_index,
        )
        for prompt_index, prompt_ids in enumerate(prompts)
        for sample_index in range(body.num_samples)
    ]


async def _echoes(
    serving: Serving, body: CompletionBody, samples: list[SampleRequest]
) -> list[Echo]:
    if not body.echo:
        return []
    encoder, echoes = serving.encoder, []
    for prompt, first in zip(body.prompts, samples[:: body.num_samples], strict=True):
        if isinstance(prompt, str):  # echoed as it was given
            text = prompt
        else:
            text = "" if encoder.tokenizer is None else encoder.decode(first.prompt_ids)
        tokens = None
        if body.num_logprobs is not None:
            tokens = await score_prompt(serving, first.prompt_ids, first.params)
        echoes.append(Echo(text, tokens))
    return echoes


async def _prompt_logprobs(
    serving: Serving, body: CompletionBody, samples: list[SampleRequest], texts: OutputTexts
) -> list[PromptLogprobs]:
    if body.prompt_logprobs is None:
        return []
    return [
        await prompt_logprobs(
            serving, first.prompt_ids, first.params, body.prompt_logprobs, texts.spelling
        )
        for first in samples[:: body.num_samples]
    ]
