"""`/inference/v1/generate`: token ids in, token ids and logprobs out.

A client that holds the ids itself continues a conversation from what was really sampled: text that
is decoded and encoded again may have other tokens.
"""

from __future__ import annotations

import base64
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import WITHOUT_EFFECT
from rollout.server.body_fields import EVENTS, Listed, Rid, refuse_unknown
from rollout.server.openai.answer import finish, sampling_mask, token_counts
from rollout.server.openai.logprobs import LogprobWriter, ScoredTokens, TokenSpelling
from rollout.server.openai.prompt_logprobs import (
    NumPromptLogprobs,
    PromptLogprobs,
    prompt_logprobs,
)
from rollout.server.openai.route import OpenAIRoute
from rollout.server.openai.sampling_body import HARMLESS, SamplingFields, StreamOptions
from rollout.server.respond import respond
from rollout.server.serving import Serving
from rollout.server.streams import DeltaStream, SampleRequest, while_connected
from rollout.types import EmittedTokens, Rollout, SamplingParams

HARMLESS_SAMPLING = WITHOUT_EFFECT | {"include_stop_str_in_output"}
"""Fields that change no token, and nothing of an answer without text."""


class TokenSamplingBody(SamplingFields):
    """vLLM's SamplingParams."""

    max_tokens: int | None = None  # default: what the context leaves
    logprobs: int | None = None  # most likely tokens beside the sampled one
    prompt_logprobs: NumPromptLogprobs | None = None
    grammar_after: str | None = Field(
        None, description="the grammar begins after this text, as chats that reason have it"
    )
    routed_experts_prompt_start: int = 0  # experts of earlier positions are left out

    def to_params(
        self,
        prompt_len: int,
        max_context_len: int,
        seed: int,
        prefix: str = "sampling_params.",
        harmless: Set[str] = HARMLESS_SAMPLING,
        **asked: Any,
    ) -> SamplingParams:
        """Raises InvalidInputError naming the field, behind ``prefix``; ``harmless``: see
        `refuse_unknown`; ``asked``: see `sampling_params`."""
        refuse_unknown(self.model_extra, harmless, prefix)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidInputError(
                f"{prefix}logprob_token_ids", self.logprob_token_ids, "needs logprobs"
            )
        if not 0 <= self.routed_experts_prompt_start <= prompt_len:
            raise InvalidInputError(
                f"{prefix}routed_experts_prompt_start", self.routed_experts_prompt_start,
                f"must be in [0, {prompt_len}] of this prompt",
            )  # fmt: skip
        left = max(1, max_context_len - prompt_len)
        try:
            return self.sampling_params(
                max_tokens=left if self.max_tokens is None else self.max_tokens,
                seed=seed,
                top_logprobs=self.logprobs or 0,
                grammar_after=self.grammar_after,
                **asked,
            )
        except InvalidInputError as error:
            name = f"{prefix}{error.field}"
            raise InvalidInputError(name, error.value, error.remedy) from None


class TokenGenerateBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    token_ids: Listed[int]
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


class SkyrlGenerateBody(TokenGenerateBody):
    """``return_sample_support``: the tokens that truncation left, in rows of top_k."""

    return_sample_support: bool | None = None


class _TokenAnswer:
    def __init__(
        self,
        body: TokenGenerateBody,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        spelling: TokenSpelling,
    ) -> None:
        self._body = body
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
                self._choice(index, rollout) | self._end(rollout)
                for index, rollout in enumerate(rollouts)
            ],
            "prompt_logprobs": of_prompt,
            "kv_transfer_params": None,
            "weight_version": _newest_version(rollouts),
            "request_spec_decode_stats": _spec_stats(rollouts),
            "usage": self._usage(rollouts),
        }

    async def parts(self, deltas: DeltaStream) -> AsyncGenerator[dict[str, Any], None]:
        rollouts: list[Rollout] = []
        options = self._body.stream_options
        counts: Counter[int] = Counter()  # tokens by choice
        async for delta in deltas:
            choice = self._choice(delta.index, delta.tokens)
            event: dict[str, Any] = {
                "request_id": self._request_id,
                "choices": [choice],
                "weight_version": _newest_version([delta.tokens]),
            }
            if delta.rollout is not None:
                rollouts.append(delta.rollout)
                choice |= self._end(delta.rollout)
                event["request_spec_decode_stats"] = _spec_stats(rollouts)
            counts[delta.index] += len(delta.tokens.token_ids)
            if options is not None and options.of_parts:
                event["usage"] = token_counts(len(self._prompt_ids), counts[delta.index])
            yield event
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

    def _end(self, rollout: Rollout) -> dict[str, Any]:
        return finish(rollout, self._body.sampling_params.routed_experts_prompt_start)

    def _usage(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        count = sum(len(rollout.token_ids) for rollout in rollouts)
        cached = max((rollout.stats.cached_tokens for rollout in rollouts), default=0)
        return {
            **token_counts(len(self._prompt_ids), count),
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _spec_stats(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """What drafts did for these choices, by vLLM's names."""
    return {
        "num_accepted_draft_tokens": sum(each.stats.accepted for each in rollouts),
        "num_draft_tokens": sum(each.stats.drafted for each in rollouts),
        "num_spec_steps": sum(each.stats.verify_steps for each in rollouts),
    }


def _newest_version(of: Sequence[EmittedTokens]) -> str | None:
    """The last weights that made a token, as text; None where there are no tokens."""
    versions = [version for tokens in of for version in tokens.weight_versions]
    return str(max(versions)) if versions else None


class _SkyrlAnswer(_TokenAnswer):
    """The answer with arrays as SkyRL packs them: bytes in base64, shape and dtype."""

    def _choice(self, index: int, tokens: EmittedTokens) -> dict[str, Any]:
        choice = super()._choice(index, tokens)
        masks = choice.pop("sampling_mask", None)
        support = None
        if masks is not None:
            # SkyRL's trainer renormalises over a row, or over all tokens if the row is empty: then
            # too many tokens tie for the last place.
            top_k = self._body.sampling_params.top_k or 0
            rows = np.full((len(masks), top_k), -1, np.int32)
            logprobs = list(tokens.logprobs)
            for t, mask in enumerate(masks):
                if len(mask) <= top_k:
                    rows[t, : len(mask)] = mask
                    logprobs[t] = tokens.extras.sampling_logprobs[t]
            choice["logprobs"] = {"content": [{"logprob": each} for each in logprobs]}
            support = _packed(rows)
        return choice | {"rollout_sample_support": support}

    def _end(self, rollout: Rollout) -> dict[str, Any]:
        experts = rollout.routed_experts
        if experts is not None:
            experts = experts[self._body.sampling_params.routed_experts_prompt_start :]
        end = finish(replace(rollout, routed_experts=None))
        return end | {"routed_experts": None if experts is None else _packed(_narrowed(experts))}


def _packed(values: NDArray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(values).data).decode("ascii")
    return {"data": data, "shape": list(values.shape), "dtype": values.dtype.name}


def _narrowed(experts: NDArray) -> NDArray:
    """The ids in the smallest of the dtypes that SkyRL reads, which it insists on."""
    most = int(experts.max(initial=0))
    return experts.astype(np.uint8 if most < 2**8 else np.int16 if most < 2**15 else np.int32)


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=OpenAIRoute)
    spelling = TokenSpelling(serving.encoder.tokenizer)

    @router.post("/inference/v1/generate", responses=EVENTS)
    async def generate(body: TokenGenerateBody, request: Request) -> Response:
        """The ids that follow a prompt, with the logprobs of the distribution they came from."""
        return await answered(body, request)

    @router.post("/skyrl/v1/generate")
    async def skyrl_generate(body: SkyrlGenerateBody, request: Request) -> Response:
        """The same for SkyRL, which replays in training the experts of each token, and the tokens
        that top_k left."""
        wants_support = bool(body.return_sample_support)
        if body.stream:
            raise InvalidInputError("stream", True, "/inference/v1/generate streams")
        if wants_support and not 1 < (body.sampling_params.top_k or 0) <= serving.vocab_size:
            raise InvalidInputError(
                "sampling_params.top_k", body.sampling_params.top_k,
                f"return_sample_support needs 2 to {serving.vocab_size}",
            )  # fmt: skip
        wants_experts = serving.serve_config.model.record_routes or not wants_support
        asked = body.model_copy(
            update={"return_routed_experts": wants_experts, "return_sampling_mask": wants_support}
        )
        return await answered(asked, request, _SkyrlAnswer)

    async def answered(
        body: TokenGenerateBody, request: Request, kind: type[_TokenAnswer] = _TokenAnswer
    ) -> Response:
        serving.require_model(body.model)
        refuse_unknown(body.model_extra, HARMLESS)
        sampling = body.sampling_params
        if body.stream_options is not None:
            body.stream_options.check_fields()
        if body.stream and sampling.prompt_logprobs is not None:
            raise InvalidInputError("stream", True, "prompt_logprobs come with stream=false alone")
        serving.require_batch(sampling.num_samples, "sampling_params.n")
        (prompt_ids,) = await serving.encode([body.token_ids], "token_ids")
        params = sampling.to_params(
            len(prompt_ids),
            serving.max_context_len,
            serving.fresh_seed(),
            sampling_mask=bool(body.return_sampling_mask),
            sampling_logprobs=kind is _SkyrlAnswer and bool(body.return_sampling_mask),
            routed_experts=bool(body.return_routed_experts),
        )
        if body.return_sampling_mask is None:
            params = replace(params, sampling_mask=params.truncates)
        request_id = uuid.uuid4().hex if body.request_id is None else body.request_id
        samples = [
            SampleRequest(prompt_ids=prompt_ids, params=params, sample_index=index, rid=request_id)
            for index in range(sampling.num_samples)
        ]
        answer = kind(body, request_id, prompt_ids, params, spelling)
        of_prompt = None
        if sampling.prompt_logprobs is not None:
            scoring = prompt_logprobs(
                serving, prompt_ids, params, sampling.prompt_logprobs, spelling
            )
            of_prompt = await while_connected(request, scoring)

        def whole(rollouts: list[Rollout]) -> dict[str, Any]:
            return answer.whole(rollouts, of_prompt)

        return await respond(
            request, serving, samples, whole, answer.parts if body.stream else None
        )

    return router
