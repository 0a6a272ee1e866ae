"""The prompt as the beginning of its completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout.server.openai.logprobs import ScoredTokens
from rollout.server.serving import Serving
from rollout.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Echo:
    text: str
    tokens: ScoredTokens | None  # where logprobs are asked for


async def echo_of(
    serving: Serving,
    prompt: str | Sequence[int],
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    with_logprobs: bool,
) -> Echo:
    """A prompt given as text is echoed as it was given.

    Its tokens' logprobs are those of the distribution completions are sampled from, so that what
    was generated can be scored as it was; penalties of repeated *output* do not apply. The first
    token has none.
    """
    if isinstance(prompt, str):
        text = prompt
    else:
        text = "" if serving.encoder.tokenizer is None else serving.encoder.decode(prompt_ids)
    if not with_logprobs:
        return Echo(text, None)
    logprobs: list[float] = []
    tops: Sequence[Sequence[tuple[int, float]]] = []
    if len(prompt_ids) > 1:
        plain = replace(params, presence_penalty=0.0, frequency_penalty=0.0)
        logprobs, extras = await serving.score(prompt_ids[:1], prompt_ids[1:], plain)
        tops = extras.top_logprobs or [()] * len(logprobs)
    return Echo(
        text, ScoredTokens(token_ids=prompt_ids, logprobs=[None, *logprobs], tops=[(), *tops])
    )
