"""vLLM's former `/generate`, of a prompt in token ids: its body and its answer.

It shares its path with sglang's, which has no field ``prompt``.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict

from rollout.errors import InvalidInputError
from rollout.server.body_fields import Listed
from rollout.server.openai.logprobs import ScoredTokens, json_number
from rollout.server.respond import respond
from rollout.server.serving import Serving
from rollout.server.streams import SampleRequest
from rollout.server.vllm.generate import HARMLESS_SAMPLING, TokenSamplingBody
from rollout.types import Rollout

_DEFAULT_MAX_TOKENS = 16
OF_TEXT = frozenset({"detokenize", "include_stop_str_in_output", "spaces_between_special_tokens"})
"""Fields that would change the answer's text, beside those that are read."""


class PromptIds(BaseModel):
    """A prompt of token ids; a text is for the other calls."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt_token_ids: Listed[int]


class PromptBody(TokenSamplingBody):
    """A prompt, with the fields of sampling beside it."""

    prompt: PromptIds
    skip_special_tokens: bool | None = None
    stream: Literal[False] | None = None


async def answer_prompt(serving: Serving, body: PromptBody, request: Request) -> Response:
    """Generate, and answer all samples in lists."""
    if body.prompt_logprobs is not None:
        raise InvalidInputError(
            "prompt_logprobs", body.prompt_logprobs, "is for /inference/v1/generate"
        )
    serving.require_batch(body.num_samples, "n")
    (prompt_ids,) = await serving.encode([body.prompt.prompt_token_ids], "prompt")
    if body.max_tokens is None:
        body.max_tokens = _DEFAULT_MAX_TOKENS
    params = body.to_params(
        len(prompt_ids),
        serving.max_context_len,
        serving.fresh_seed(),
        prefix="",
        harmless=HARMLESS_SAMPLING - OF_TEXT,
    )
    samples = [
        SampleRequest(prompt_ids=prompt_ids, params=params, sample_index=index)
        for index in range(body.num_samples)
    ]
    encoder = serving.encoder

    def text(rollout: Rollout) -> str:
        if rollout.text is None or body.skip_special_tokens is not False:
            return rollout.text or ""
        return encoder.decode_with_specials(rollout.token_ids)

    def whole(rollouts: list[Rollout]) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "text": [text(rollout) for rollout in rollouts],
            "prompt": "" if encoder.tokenizer is None else encoder.decode(prompt_ids),
            "finish_reasons": [str(rollout.finish_reason) for rollout in rollouts],
        }
        if body.logprobs is None:
            return answer
        return answer | {
            "logprobs": [_logprobs(rollout) for rollout in rollouts],
            "prompt_token_ids": prompt_ids,
            "token_ids": [rollout.token_ids for rollout in rollouts],
        }

    return await respond(request, serving, samples, whole)


def _logprobs(rollout: Rollout) -> list[list[dict[str, float]]]:
    """Logprobs at each position by token id: the sampled token, then the most likely ones."""
    return [
        [{str(each): json_number(value) for each, value in [(token, logprob), *tops]}]
        for token, logprob, tops in ScoredTokens.of(rollout)
    ]
