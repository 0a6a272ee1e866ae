"""Parameters and seeds of the engine's requests, from those a verl agent loop sends."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import our_fields, refuse_unhonoured
from rollout.sampling.seeds import derive_seed
from rollout.types import SamplingParams

_LIMITS = ("max_tokens", "max_new_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseLimits:
    """Limits of a whole response in tokens, as verl's rollout configuration gives them."""

    prompt_length: int
    response_length: int

    def default(self, prompt_len: int) -> int:
        """The limit for a request that names none: what is left of both lengths, after several
        turns too."""
        return min(self.response_length, self.prompt_length + self.response_length - prompt_len)


def engine_params(
    sent: Mapping[str, Any],
    *,
    prompt_len: int,
    partial_len: int,
    max_context_len: int,
    limits: ResponseLimits,
    ignore_eos: bool,
    stop_token_ids: tuple[int, ...] = (),
    raw_logprobs: bool = False,
    routed_experts: bool = False,
) -> tuple[SamplingParams, bool]:
    """The engine's parameters, and whether logprobs are wanted. None counts as not sent.

    ``partial_len`` tokens of the response exist; a limit that was sent counts what comes after
    them. Raises InvalidInputError for a parameter the engine has not, and for a prompt that leaves
    no room.
    """
    given = {name: value for name, value in sent.items() if value is not None}
    wants_logprobs = given.pop("logprobs", False)
    if wants_logprobs not in (False, True):  # 0 and 1 equal them
        raise InvalidInputError(
            "sampling_params.logprobs", wants_logprobs, "must be False or True: the token's own"
        )
    named = [given.pop(name) for name in _LIMITS if name in given]
    left = next(iter(named), None)
    if not given.pop("include_stop_str_in_output", True):
        raise InvalidInputError(
            "sampling_params.include_stop_str_in_output", False, "must be True: tokens are sent"
        )
    refuse_unhonoured(given, lambda name: f"sampling_params.{name}", but=("seed",))
    ours = {"ignore_eos": ignore_eos} | our_fields(given)
    if not ours["ignore_eos"]:
        ours["stop_token_ids"] = [*(ours.get("stop_token_ids") or ()), *stop_token_ids]
    room = max_context_len - prompt_len
    if room - partial_len < 1:
        raise InvalidInputError(
            "prompt_ids",
            f"{prompt_len + partial_len} tokens",
            f"leave no room in the context of {max_context_len}",
        )
    total = limits.default(prompt_len) if left is None else partial_len + left
    ours["max_new_tokens"] = max(partial_len + 1, min(total, room))
    params = SamplingParams(**ours, raw_logprobs=raw_logprobs, routed_experts=routed_experts)
    return params, bool(wants_logprobs)


_COUNTED_STEPS = 8  # trainer steps whose samples are counted; replicas are at most one apart


@dataclass(frozen=True, slots=True)
class RequestStart:
    """The seed that a request begins with, and the length of its prompt."""

    seed: int  # the request seed
    prompt_len: int  # tokens after it were generated before a cut


class RequestSeeds:
    """Gives every sample its seed; one for all replicas of a run.

    verl names a request anew at each call, also where it resubmits one that was aborted, so seeds
    go by content. A sample's seed derives from (run seed, trainer step, prompt, how many samples of
    that prompt began in that step): the samples of a prompt are the same set whichever replica
    makes which, and however many replicas there are. A request that was cut comes back as prompt
    plus partial; those very tokens find its seed, so it goes on as if it had never been cut. Where
    several were cut with the same tokens, the first that comes back takes the first seed: they
    cannot be told apart.
    """

    def __init__(self, run_seed: int, max_cut: int = 65536) -> None:
        """``max_cut``: cut requests that are remembered; older ones continue with a new seed."""
        self._run_seed = run_seed
        self._max_cut = max_cut
        self._begun: dict[int, Counter[int]] = {}  # trainer step -> prompt key -> samples
        self._cut: OrderedDict[int, list[RequestStart]] = OrderedDict()
        self._num_cut = 0

    def start(self, key: int, num_tokens: int, step: int) -> RequestStart:
        """The start of a request of ``num_tokens`` tokens: a cut request's own, else a new one.

        ``key``: of those tokens, `rollout.engine.tokenizer.prompt_group`. ``step``: the trainer
        step of the weights the request begins under.
        """
        if waiting := self._cut.get(key):
            start = waiting.pop(0)
            self._num_cut -= 1
            if not waiting:
                del self._cut[key]
            return start
        step = max(step, max(self._begun, default=step) - _COUNTED_STEPS + 1)
        if step not in self._begun:
            self._begun[step] = Counter()
            for old in [counted for counted in self._begun if counted <= step - _COUNTED_STEPS]:
                del self._begun[old]
        sample = self._begun[step][key]
        self._begun[step][key] += 1
        prompt_seed = derive_seed(self._run_seed, step, key)
        return RequestStart(derive_seed(prompt_seed, sample, 0), num_tokens)

    def cut(self, key: int, start: RequestStart) -> None:
        """A request that began with ``start`` ended early; ``key`` is of all its tokens."""
        self._cut.setdefault(key, []).append(start)
        self._num_cut += 1
        while self._num_cut > self._max_cut:
            _, oldest = self._cut.popitem(last=False)
            self._num_cut -= len(oldest)
