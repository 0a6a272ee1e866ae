"""Logprobs of a prompt's own tokens: as `echo` has them, and as vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from rollout.server.openai.logprobs import (
    ScoredTokens,
    TokenSpelling,
    json_number,
    tops_of,
)
from rollout.server.serving import Serving
from rollout.types import SamplingParams

NumPromptLogprobs = Annotated[
    int, Field(ge=0, le=100, description="number of most likely tokens beside the prompt's")
]
PromptLogprobs = list[dict[str, Any] | None]
"""By position of the prompt, in vLLM's shape; None for the first, which nothing comes before."""


async def score_prompt(
    serving: Serving, prompt_ids: Sequence[int], params: SamplingParams
) -> ScoredTokens:
    """The prompt's tokens; the first has no logprob, since nothing comes before it.

    The distribution is the one that completions are sampled from, so that what was generated can be
    scored as it was; penalties of repeated *output* do not apply.
    """
    logprobs: list[float] = []
    tops: Sequence[Sequence[tuple[int, float]]] = []
    if len(prompt_ids) > 1:
        plain = replace(params, presence_penalty=0.0, frequency_penalty=0.0, sampling_mask=False)
        logprobs, extras = await serving.score(prompt_ids[:1], prompt_ids[1:], plain)
        tops = tops_of(extras, len(logprobs))
    return ScoredTokens(token_ids=prompt_ids, logprobs=[None, *logprobs], tops=[(), *tops])


async def prompt_logprobs(
    serving: Serving,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    count: int,
    spelling: TokenSpelling,
) -> PromptLogprobs:
    """vLLM's shape: by position the token itself, then the ``count`` most likely ones, by id.

    The rank of a token that is not among those is ``count + 1``: it has that one at least.
    """
    scored = await score_prompt(serving, prompt_ids, replace(params, top_logprobs=count))
    return [_position(spelling, *each) for each in scored]


def _position(
    spelling: TokenSpelling,
    token: int,
    logprob: float | None,
    tops: Sequence[tuple[int, float]],
) -> dict[str, Any] | None:
    if logprob is None:
        return None
    ranks = {each: rank for rank, (each, _) in enumerate(tops, start=1)}
    return {
        str(each): {
            "logprob": json_number(value),
            "rank": ranks.get(each, len(tops) + 1),
            "decoded_token": spelling.text(each),
        }
        for each, value in [(token, logprob), *tops]
    }
