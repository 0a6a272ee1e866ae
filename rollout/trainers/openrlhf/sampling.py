"""vLLM's sampling parameters and outputs, as OpenRLHF and its agents write and read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from rollout.engine.stopping import cut_at_stop
from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import our_fields, refuse_unhonoured
from rollout.types import FinishReason, Rollout, SamplingParams


@dataclass(kw_only=True, slots=True)
class VllmSamplingParams:
    """A stand-in for ``vllm.SamplingParams``, with its names and defaults."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    seed: int | None = None


def engine_params(params: VllmSamplingParams) -> SamplingParams:
    """The engine's parameters. Raises InvalidInputError for what the engine has no equal of."""
    defaults = VllmSamplingParams()
    given = {
        name: value for name, value in asdict(params).items() if value != getattr(defaults, name)
    }
    if params.logprobs not in (None, 0, 1):
        raise InvalidInputError(
            "sampling_params.logprobs", params.logprobs, "must be None, 0 or 1: the token's own"
        )
    if params.max_tokens is None:
        raise InvalidInputError("sampling_params.max_tokens", None, "must be given")
    refuse_unhonoured(
        {name: value for name, value in given.items() if name != "logprobs"},
        lambda name: f"sampling_params.{name}",
    )
    ours = our_fields(given) | {"max_new_tokens": params.max_tokens}
    ours.pop("seed", None)  # the sample's
    ours["min_new_tokens"] = min(ours.get("min_new_tokens", 0), params.max_tokens)
    return SamplingParams(**ours)


Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """vLLM's ``Logprob``."""

    logprob: float  # what the trainer recomputes: at the sampling temperature, not truncated


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """vLLM's class of that name, as far as OpenRLHF reads it."""

    text: str  # without the token or string that stopped it
    token_ids: list[int]  # with it
    finish_reason: str  # stop or length
    logprobs: list[dict[int, TokenLogprob]] | None  # per token, of that token alone


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """vLLM's class of that name, as far as OpenRLHF reads it."""

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
