"""Requests from checked prompts and parameters, and rollouts of ended ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.engine.grammars import Grammars
from rollout.engine.stop_regex import StopRegexes
from rollout.engine.stopping import TokenStopCheck, cut_at_stop
from rollout.engine.token_constraints import AllowedTokens, BadWords
from rollout.engine.tokenizer import PromptEncoder, prompt_group
from rollout.errors import InvalidInputError
from rollout.sampling.seeds import as_int64, derive_seed
from rollout.types import FinishReason, Request, Rollout, SamplingParams, TokenConstraint
from rollout.validation import checked_int


class RequestFactory:
    """Makes requests, and the rollouts of ended ones. Numbers requests and refuses what could never
    run."""

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
        self.stop_regexes = StopRegexes(encoder.tokenizer)
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
            seed = checked_int(seed, "request_seed", minimum=-(2**63), maximum=2**64 - 1) % 2**64
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
                regex=self.stop_regexes.open(params),
            ),
            constraints=self._constraints(params, partial),
        )
        self._check_fits(request, field)
        self._next_id += 1
        return request

    def compile(self, params: SamplingParams) -> None:
        """Compile grammars and patterns of stops, so that `make` is quick. On any thread. Raises
        InvalidInputError."""
        self.grammars.compile(params)
        self.stop_regexes.compile(params)

    def rollout(self, request: Request) -> Rollout:
        text = matched = None
        if request.finish_reason is FinishReason.STOP:
            matched = request.stop_check.matched(request)
        if self._encoder.tokenizer is not None:
            text = self._encoder.decode(request.token_ids)
            if request.finish_reason is FinishReason.STOP and request.params.stop:
                shorter = self._encoder.decode(request.token_ids[:-1])
                text = cut_at_stop(text, len(shorter), request.params.stop)
        return Rollout(
            request_id=request.request_id,
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            seed=as_int64(request.seed),
            prompt_ids=request.tokens[: request.prompt_len],
            token_ids=request.token_ids,
            logprobs=request.logprobs,
            weight_versions=request.weight_versions,
            finish_reason=request.finish_reason or FinishReason.ABORT,
            text=text,
            matched_stop=matched,
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
        for name in ("stop", "stop_regex", "bad_words"):
            texts = getattr(params, name)
            if texts and self._encoder.tokenizer is None:
                raise InvalidInputError(f"sampling.{name}", texts, "texts need a tokenizer")
        ids = {
            "logit_bias": params.logit_bias,
            # Clients send one list to every model: ids beyond the vocabulary never come.
            "stop_token_ids": [token for token in params.stop_token_ids if token < 0],
            "allowed_token_ids": params.allowed_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids,
        }
        for name, tokens in ids.items():
            for token in tokens:
                if not 0 <= token < self._vocab_size:
                    raise InvalidInputError(
                        f"sampling.{name}", token, f"must be in [0, {self._vocab_size})"
                    )
