"""Where a request ends: end-of-sequence and stop tokens, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.types import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]

_TOKENS_PER_CHARACTER = 4  # at most, in UTF-8 byte-level vocabularies


class TokenStopCheck:
    """Asked once about each emitted token, in order, so grouping into steps cannot be seen.

    Before ``min_new_tokens`` nothing stops. A stop string ends the request at the token that
    completes it.
    """

    def __init__(
        self,
        *,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
        generated: Sequence[int] = (),
    ) -> None:
        """``generated`` are tokens emitted before, of a rollout that was cut."""
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset([*eos, *params.stop_token_ids])
        self._stop = params.stop
        self._decode = decode
        self._min_new_tokens = params.min_new_tokens
        self._generated = list(generated)
        longest = max((len(stop) for stop in params.stop), default=0)
        self._window = _TOKENS_PER_CHARACTER * (longest + 1)

    def first_stop(self, new_token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        for kept, token in enumerate(new_token_ids, start=1):
            self._generated.append(token)
            if len(self._generated) < self._min_new_tokens:
                continue
            if token in self.stop_token_ids or self._ends_in_stop_string():
                return kept, FinishReason.STOP
        return len(new_token_ids), None

    def _ends_in_stop_string(self) -> bool:
        if not self._stop or self._decode is None:
            return False
        tail = self._decode(self._generated[-self._window :])
        return any(stop in tail for stop in self._stop)


def cut_at_stop(text: str, params: SamplingParams) -> str:
    """The text before the first stop string, as users of stop strings expect it."""
    found = [at for stop in params.stop if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
