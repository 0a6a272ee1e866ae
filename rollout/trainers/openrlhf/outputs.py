"""Rollouts in the shape in which OpenRLHF's executors read vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rollout.engine.requests import cut_at_stop
from rollout.types import FinishReason, Rollout

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    logprob: float  # what the trainer recomputes: at the sampling temperature, not truncated


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    text: str  # without the token or string that stopped it
    token_ids: list[int]  # with it
    finish_reason: str  # stop or length
    logprobs: list[dict[int, TokenLogprob]] | None  # per token, of that token alone


@dataclass(frozen=True, slots=True)
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # one


def request_output(
    rollout: Rollout,
    decode: Decode,
    *,
    stop_token_ids: Collection[int],
    stop: Sequence[str],
    with_logprobs: bool,
) -> RequestOutput:
    """``decode``: token ids to text. ``stop_token_ids`` may end a rollout and are no text then."""
    ids = rollout.token_ids
    stopped = rollout.finish_reason is FinishReason.STOP
    by_token = stopped and bool(ids) and ids[-1] in stop_token_ids
    text = decode(ids[:-1] if by_token else ids)
    if stopped and stop and not by_token:
        text = cut_at_stop(text, len(decode(ids[:-1])), stop)
    logprobs = None
    if with_logprobs:
        pairs = zip(ids, rollout.logprobs, strict=True)
        logprobs = [{token: TokenLogprob(logprob)} for token, logprob in pairs]
    output = CompletionOutput(text, ids, str(rollout.finish_reason), logprobs)
    return RequestOutput(rollout.prompt_ids, [output])
