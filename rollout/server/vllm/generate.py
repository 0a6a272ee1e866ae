"""`/inference/v1/generate`: token ids in, token ids and logprobs out.

A client that holds the ids itself continues a conversation from what was really sampled: text that
is decoded and encoded again may have other tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import WITHOUT_EFFECT
from rollout.server.body_fields import EVENTS, KnownIds, Listed, Rid, refuse_unknown
from rollout.server.json_route import json_response
from rollout.server.openai.answer import finish, sampling_mask
from rollout.server.openai.logprobs import LogprobWriter, ScoredTokens, TokenSpelling
from rollout.server.openai.prompt_logprobs import (
    NumPromptLogprobs,
    PromptLogprobs,
    prompt_logprobs,
)
from rollout.server.openai.route import OpenAIRoute
from rollout.server.openai.sampling_body import HARMLESS, SamplingFields, StreamOptions
from rollout.server.serving import Serving
from rollout.server.streams import (
    DeltaStream,
    EventStream,
    SampleRequest,
    open_stream,
    while_connected,
)
from rollout.types import EmittedTokens, Rollout, SamplingParams

_HARMLESS_SAMPLING = WITHOUT_EFFECT | {
    "include_stop_str_in_output",  # no text is answered
    "routed_experts_prompt_start",  # all positions are told
}


class TokenSamplingBody(SamplingFields):
    """vLLM's SamplingParams."""

    max_tokens: int | None = None  # default: what the context leaves
    logprobs: int | None = None  # so many of the most likely tokens, beside the sampled one
    prompt_logprobs: NumPromptLogprobs | None = None

    def to_params(
        self,
        prompt_len: int,
        max_context_len: int,
        seed: int,
        prefix: str = "sampling_params.",
        **asked: Any,
    ) -> SamplingParams:
        """Raises InvalidInputError naming the field, behind ``prefix``; ``asked``: see
        `sampling_params`."""
        refuse_unknown(self.model_extra, _HARMLESS_SAMPLING, prefix)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidInputError(
                f"{prefix}logprob_token_ids", self.logprob_token_ids, "needs logprobs"
            )
        left = max(1, max_context_len - prompt_len)
        try:
            return self.sampling_params(
                max_tokens=left if self.max_tokens is None else self.max_tokens,
                seed=seed,
                top_logprobs=self.logprobs or 0,
                **asked,
            )
        except InvalidInputError as error:
            name = f"{prefix}{error.field}"
            raise InvalidInputError(name, error.value, error.remedy) from None


class TokenGenerateBody(BaseModel):
    """A prompt of token ids."""

    model_config = ConfigDict(strict=True, extra="allow")

    token_ids: Annotated[Listed[int], KnownIds]
    sampling_params: TokenSamplingBody
    request_id: Rid | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_sampling_mask: bool | None = Field(
        None, description="default: where top_k, top_p or min_p cut the distribution"
    )
    return_routed_experts: bool | None = None


class _TokenAnswer:
    """The answer to one body, whole or in parts."""

    def __init__(
        self,
        body: TokenGenerateBody,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        spelling: TokenSpelling,
        *,
        lists_experts: bool,
    ) -> None:
        self._body = body
        self._lists_experts = lists_experts
        self._tells_mask = params.sampling_mask
        self._request_id = request_id
        self._prompt_ids = prompt_ids
        self._writer = LogprobWriter(spelling, as_ids=True)

    def whole(
        self, rollouts: Sequence[Rollout], of_prompt: PromptLogprobs | None
    ) -> dict[str, Any]:
        prompt_ids = {"prompt_token_ids": self._prompt_ids} if self._body.return_token_ids else {}
        return {
            "request_id": self._request_id,
            **prompt_ids,
            "choices": [
                self._choice(index, rollout) | finish(rollout) | self._experts(rollout)
                for index, rollout in enumerate(rollouts)
            ],
            "prompt_logprobs": of_prompt,
            "kv_transfer_params": None,
            "usage": self._usage(rollouts),
        }

    async def parts(self, deltas: DeltaStream) -> AsyncGenerator[dict[str, Any], None]:
        rollouts: list[Rollout] = []
        async for delta in deltas:
            choice = self._choice(delta.index, delta.tokens)
            if delta.rollout is not None:
                rollouts.append(delta.rollout)
                choice |= finish(delta.rollout)
            yield {"request_id": self._request_id, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            usage = self._usage(rollouts)
            yield {"request_id": self._request_id, "choices": [], "usage": usage}

    def _choice(self, index: int, tokens: EmittedTokens) -> dict[str, Any]:
        wants_logprobs = self._body.sampling_params.logprobs is not None
        return {
            "index": index,
            "token_ids": list(tokens.token_ids),
            "logprobs": self._writer.of_chat(ScoredTokens.of(tokens)) if wants_logprobs else None,
            "finish_reason": None,
            **sampling_mask(tokens, self._tells_mask),
        }

    def _experts(self, rollout: Rollout) -> dict[str, Any]:
        """By position and layer those that a token went to, for SkyRL: as lists."""
        if not self._lists_experts or rollout.routed_experts is None:
            return {}
        return {"routed_experts": rollout.routed_experts.tolist()}

    def _usage(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        count = sum(len(rollout.token_ids) for rollout in rollouts)
        cached = max((rollout.stats.cached_tokens for rollout in rollouts), default=0)
        return {
            "prompt_tokens": len(self._prompt_ids),
            "completion_tokens": count,
            "total_tokens": len(self._prompt_ids) + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=OpenAIRoute)
    spelling = TokenSpelling(serving.encoder.tokenizer)

    @router.post("/inference/v1/generate", responses=EVENTS)
    async def generate(body: TokenGenerateBody, request: Request) -> Response:
        """The ids that follow a prompt, with the logprobs of the distribution they came from."""
        return await answered(body, request)

    @router.post("/skyrl/v1/generate")
    async def skyrl_generate(body: TokenGenerateBody, request: Request) -> Response:
        """The same for SkyRL, which replays the experts of each token in training."""
        if body.stream:
            raise InvalidInputError("stream", True, "/inference/v1/generate streams")
        asked = body.model_copy(update={"return_routed_experts": True})
        return await answered(asked, request, lists_experts=True)

    async def answered(
        body: TokenGenerateBody, request: Request, *, lists_experts: bool = False
    ) -> Response:
        serving.require_model(body.model)
        refuse_unknown(body.model_extra, HARMLESS)
        sampling = body.sampling_params
        if body.stream and sampling.prompt_logprobs is not None:
            raise InvalidInputError("stream", True, "prompt_logprobs come with stream=false alone")
        serving.require_batch(sampling.num_samples, "sampling_params.n")
        (prompt_ids,) = await serving.encode([body.token_ids], "token_ids")
        params = sampling.to_params(
            len(prompt_ids),
            serving.max_context_len,
            serving.fresh_seed(),
            sampling_mask=bool(body.return_sampling_mask),
            routed_experts=bool(body.return_routed_experts),
        )
        if body.return_sampling_mask is None:
            params = replace(params, sampling_mask=params.truncates)
        request_id = uuid.uuid4().hex if body.request_id is None else body.request_id
        samples = [
            SampleRequest(prompt_ids=prompt_ids, params=params, sample_index=index, rid=request_id)
            for index in range(sampling.num_samples)
        ]
        answer = _TokenAnswer(
            body, request_id, prompt_ids, params, spelling, lists_experts=lists_experts
        )
        if body.stream:
            await while_connected(request, serving.prepare(samples))
            deltas = await open_stream(request, serving.stream(samples))
            return EventStream(answer.parts(deltas), deltas)
        of_prompt = None
        if sampling.prompt_logprobs is not None:
            scoring = prompt_logprobs(
                serving, prompt_ids, params, sampling.prompt_logprobs, spelling
            )
            of_prompt = await while_connected(request, scoring)
        rollouts = await while_connected(request, serving.generate(samples))
        return await json_response(lambda: answer.whole(rollouts, of_prompt))

    return router
