"""Stops of requests at stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.types import FinishReason, Request, SamplingParams

Decode = Callable[[Sequence[int]], str]

_TOKENS_PER_CHARACTER = 4  # at most, in UTF-8 byte-level vocabularies


class TokenStopCheck:
    """Looks at each emitted token with what came before it, so grouping into steps cannot be seen.

    Before ``min_new_tokens`` nothing stops. A stop string ends the request at the token that
    completes it; one completed before the minimum counts no more.
    """

    def __init__(
        self, *, params: SamplingParams, eos_token_ids: Sequence[int], decode: Decode | None
    ) -> None:
        """``decode`` spells special tokens out; None where there are no stop strings."""
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset([*eos, *params.stop_token_ids])
        self._stop = params.stop
        self._decode = decode
        self._min_new_tokens = params.min_new_tokens
        self._window = max_tokens_of(params.stop)

    def first_stop(
        self, request: Request, new_token_ids: Sequence[int]
    ) -> tuple[int, FinishReason | None]:
        """The number of new tokens that count, and why the request ends there, if it does."""
        if not self._stop and self.stop_token_ids.isdisjoint(new_token_ids):
            return len(new_token_ids), None
        first_output = request.prompt_len - request.partial_len
        tail = request.tokens[max(first_output, len(request.tokens) - self._window) :]
        for count, token in enumerate(new_token_ids, start=1):
            tail.append(token)
            if request.generated_len + count < self._min_new_tokens:
                continue
            if token in self.stop_token_ids or self._completes_stop_string(tail):
                return count, FinishReason.STOP
        return len(new_token_ids), None

    def _completes_stop_string(self, tail: list[int]) -> bool:
        if not self._stop or self._decode is None:
            return False
        return completed_stop(self._stop, tail, self._decode) is not None


def matched_stop(params: SamplingParams, token_ids: Sequence[int], decode: Decode) -> int | str:
    """The stop string, or the last token, that ended an output."""
    last = token_ids[-1]
    if last in params.stop_token_ids or not params.stop:
        return last
    return completed_stop(params.stop, token_ids, decode) or last


def completed_stop(stops: Sequence[str], token_ids: Sequence[int], decode: Decode) -> str | None:
    """The stop string that the last token completes, if it completes one."""
    window = list(token_ids[-max_tokens_of(stops) :])
    after, before = decode(window), decode(window[:-1])
    return next((stop for stop in stops if after.count(stop) > before.count(stop)), None)


def max_tokens_of(texts: Sequence[str]) -> int:
    """The number of last tokens that surely hold any of the texts, and the token before it."""
    return _TOKENS_PER_CHARACTER * (max(map(len, texts), default=0) + 1)


def cut_at_stop(text: str, shorter_len: int, stops: Sequence[str]) -> str:
    """The text before the stop string its last token completed, if it completed one.

    ``shorter_len``: characters of the text without that token.
    """
    found = [(text.rfind(stop), stop) for stop in stops]
    completed = [at for at, stop in found if at >= 0 and at + len(stop) > shorter_len]
    return text[: min(completed)] if completed else text
