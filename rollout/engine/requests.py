"""Requests from checked prompts and parameters, with their stops and their forbidden tokens; and
rollouts of ended ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.engine.grammars import Grammars
from rollout.engine.tokenizer import PromptEncoder, prompt_group
from rollout.errors import InvalidInputError
from rollout.sampling.seeds import derive_seed
from rollout.types import FinishReason, Request, Rollout, SamplingParams, TokenConstraint
from rollout.validation import checked_int

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]

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
        self._window = _window(params.stop)

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


def completed_stop(stops: Sequence[str], token_ids: Sequence[int], decode: Decode) -> str | None:
    """The stop string that the last token completes, if it completes one."""
    window = list(token_ids[-_window(stops) :])
    after, before = decode(window), decode(window[:-1])
    return next((stop for stop in stops if after.count(stop) > before.count(stop)), None)


def _window(stops: Sequence[str]) -> int:
    """The number of last tokens that surely hold any stop string, and the token before it."""
    return _TOKENS_PER_CHARACTER * (max(map(len, stops), default=0) + 1)


def cut_at_stop(text: str, shorter_len: int, stops: Sequence[str]) -> str:
    """The text before the stop string its last token completed, if it completed one.

    ``shorter_len``: characters of the text without that token.
    """
    found = [(text.rfind(stop), stop) for stop in stops]
    completed = [at for at, stop in found if at >= 0 and at + len(stop) > shorter_len]
    return text[: min(completed)] if completed else text


class AllowedTokens:
    """Forbids every token that is not on a request's list."""

    def __init__(self, allowed_token_ids: Sequence[int], vocab_size: int) -> None:
        is_forbidden_V = np.ones(vocab_size, dtype=np.bool_)
        is_forbidden_V[allowed_token_ids] = False
        self._forbidden_X = np.flatnonzero(is_forbidden_V)

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens off the list, ascending; the same after any output."""
        return self._forbidden_X


class BadWords:
    """Forbids the last token of a bad word after its others.

    A word is known by its tokens, at the beginning of a text and after a space, as in vLLM: a text
    that spells it with other tokens is not noticed. Only the output counts.
    """

    def __init__(self, bad_words: Sequence[str], encode: Encode) -> None:
        self._words = [ids for word in bad_words for ids in _spellings(word, encode)]
        self._window = max(map(len, self._words), default=1) - 1

    def forbidden(self, request: Request, drafted: list[int]) -> NDArray[np.int64]:
        """The tokens that would complete a word, ascending."""
        first = max(request.prompt_len - request.partial_len, len(request.tokens) - self._window)
        before = [*request.tokens[first:], *drafted]
        completing = {
            ids[-1] for ids in self._words if before[len(before) - len(ids) + 1 :] == ids[:-1]
        }
        return np.array(sorted(completing), dtype=np.int64)


def _spellings(word: str, encode: Encode) -> list[list[int]]:
    """The word's tokens at the beginning of a text, and inside one where they are as many."""
    first, inside = encode(word.lstrip()), encode(" " + word.lstrip())
    found = [first] if first else []
    if inside and inside != first and len(inside) == len(first):
        found.append(inside)
    return found


class RequestFactory:
    """Numbers requests and refuses what could never run."""

    def __init__(
        self,
        encoder: PromptEncoder,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        check_fits: Callable[[Request, str], None],
        records_routes: bool = False,
    ) -> None:
        """
        Args:
            check_fits: called with a request and the prompt's field; raises when the prompt is too
                long to run even alone.
            records_routes: whether it is known which experts tokens go to.
        """
        self._records_routes = records_routes
        self._encoder = encoder
        self.grammars = Grammars(encoder.tokenizer, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._check_fits = check_fits
        self._next_id = 0

    def make(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        prompt_index: int = 0,
        sample_index: int = 0,
        *,
        partial: Sequence[int] = (),
        seed: int | None = None,
        field: str = "prompt",
    ) -> Request:
        """The request for one sample of one prompt.

        Raises InvalidInputError or OutOfMemoryError, naming ``field`` where it is the prompt.
        """
        self._check_params(params)
        prompt_index = checked_int(prompt_index, "prompt_index")
        sample_index = checked_int(sample_index, "sample_index")
        if seed is not None:
            seed = checked_int(seed, "request_seed", maximum=2**64 - 1)
        if len(partial) >= params.max_new_tokens:
            raise InvalidInputError(
                "partial_ids",
                f"{len(partial)} tokens",
                f"must be fewer than max_new_tokens={params.max_new_tokens}",
            )
        decode = None if self._encoder.tokenizer is None else self._encoder.decode_with_specials
        request = Request(
            request_id=self._next_id,
            tokens=[*prompt_ids, *partial],
            prompt_len=len(prompt_ids) + len(partial),
            partial_len=len(partial),
            params=params,
            seed=derive_seed(params.seed, prompt_index, sample_index) if seed is None else seed,
            group=prompt_group(prompt_ids),
            prompt_index=prompt_index,
            sample_index=sample_index,
            stop_check=TokenStopCheck(
                params=params,
                eos_token_ids=self._eos_token_ids,
                decode=decode,
            ),
            constraints=self._constraints(params, partial),
        )
        self._check_fits(request, field)
        self._next_id += 1
        return request

    def rollout(self, request: Request) -> Rollout:
        """The rollout of an ended request."""
        text = None
        if self._encoder.tokenizer is not None:
            text = self._encoder.decode(request.token_ids)
            if request.finish_reason is FinishReason.STOP and request.params.stop:
                shorter = self._encoder.decode(request.token_ids[:-1])
                text = cut_at_stop(text, len(shorter), request.params.stop)
        return Rollout(
            request_id=request.request_id,
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            seed=request.seed,
            prompt_ids=request.tokens[: request.prompt_len],
            token_ids=request.token_ids,
            logprobs=request.logprobs,
            weight_versions=request.weight_versions,
            finish_reason=request.finish_reason or FinishReason.ABORT,
            text=text,
            extras=request.extras,
            stats=request.stats,
            error=request.error,
            routed_experts=request.routed_experts,
        )

    def _constraints(self, params: SamplingParams, partial: Sequence[int]) -> list[TokenConstraint]:
        found: list[TokenConstraint] = []
        if (grammar := self.grammars.open(params, partial)) is not None:
            found.append(grammar)
        if params.allowed_token_ids is not None:
            found.append(AllowedTokens(params.allowed_token_ids, self._vocab_size))
        if params.bad_words:
            found.append(BadWords(params.bad_words, self._encoder.encode_word))
        return found

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidInputError("params", params, "must be a SamplingParams")
        if params.routed_experts and not self._records_routes:
            raise InvalidInputError(
                "sampling.routed_experts", True,
                "is not recorded: start a model that has experts with model.record_routes=true",
            )  # fmt: skip
        for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if texts and self._encoder.tokenizer is None:
                raise InvalidInputError(f"sampling.{name}", texts, "texts need a tokenizer")
        ids = {
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids,
        }
        for name, tokens in ids.items():
            for token in tokens:
                if not 0 <= token < self._vocab_size:
                    raise InvalidInputError(
                        f"sampling.{name}", token, f"must be in [0, {self._vocab_size})"
                    )
