"""Stops of requests at stop tokens, stop strings and matches of regular expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.engine.stop_regex import StopRegex
from rollout.types import FinishReason, Request, SamplingParams

Decode = Callable[[Sequence[int]], str]

_TOKENS_PER_CHARACTER = 4  # at most, in UTF-8 byte-level vocabularies


class TokenStopCheck:
    """Looks at each emitted token with what came before it, so grouping into steps cannot be seen.

    Before ``min_new_tokens`` nothing stops. A stop string, or a match of ``regex``, ends the
    request at the token that completes it; one completed before the minimum counts no more.
    """

    def __init__(
        self,
        *,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
        regex: StopRegex | None = None,
    ) -> None:
        """``decode`` spells special tokens out; None where there are no stop strings."""
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset([*eos, *params.stop_token_ids])
        self._stop = params.stop
        self._decode = decode
        self._regex = regex
        self._min_new_tokens = params.min_new_tokens
        self._window = max_tokens_of(params.stop)

    def first_stop(
        self, request: Request, new_token_ids: Sequence[int]
    ) -> tuple[int, FinishReason | None]:
        """The number of new tokens that count, and why the request ends there, if it does."""
        is_idle = not self._stop and self._regex is None
        if is_idle and self.stop_token_ids.isdisjoint(new_token_ids):
            return len(new_token_ids), None
        tail = _output(request, self._window)
        text = None if self._regex is None else self._regex.read(_output(request))
        for count, token in enumerate(new_token_ids, start=1):
            tail.append(token)
            if text is not None:
                text.push([token])
            if request.generated_len + count < self._min_new_tokens:
                continue
            if (
                token in self.stop_token_ids
                or self._completed_string(tail) is not None
                or (text is not None and text.completed() is not None)
            ):
                return count, FinishReason.STOP
        return len(new_token_ids), None

    def matched(self, request: Request) -> int | str:
        """The stop token, stop string or pattern that ended a request."""
        output = _output(request)
        if output[-1] in self.stop_token_ids:
            return output[-1]
        pattern = None if self._regex is None else self._regex.matched(output)
        return self._completed_string(output) or pattern or output[-1]

    def _completed_string(self, tail: Sequence[int]) -> str | None:
        if not self._stop or self._decode is None:
            return None
        return completed_stop(self._stop, tail, self._decode)


def _output(request: Request, max_tokens: int | None = None) -> list[int]:
    """The request's output, that of an earlier submission too; its last tokens at most."""
    first = request.prompt_len - request.partial_len
    if max_tokens is not None:
        first = max(first, len(request.tokens) - max_tokens)
    return request.tokens[first:]


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
