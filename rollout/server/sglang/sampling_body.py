"""``sampling_params`` of `/generate`: sglang's names and rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import our_fields
from rollout.server.body_fields import Biases, Listed, biases_by_id, refuse_unknown
from rollout.types import SamplingParams

_HARMLESS_SAMPLING = frozenset({"stream_interval"})  # events come as the reader takes them
_GREEDY_BELOW = 1e-6  # as temperatures that small are taken there
_MAX_TOP_K = 2**30  # a whole vocabulary, however large


class SglangSamplingBody(BaseModel):
    """A field that is null has its default, but for ``max_new_tokens``: as many as fit."""

    model_config = ConfigDict(extra="allow", strict=True)

    max_new_tokens: int | None = 128  # 0: the prompt is scored, and nothing is generated
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    stop: str | Listed[str] | None = None
    stop_regex: str | Listed[str] | None = None
    stop_token_ids: Listed[int | None] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Listed[int] | None = None  # vLLM's, and the next
    bad_words: Listed[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None  # the same
    request_seed: int | None = None  # ours: a sample's own, as meta_info tells it
    custom_params: dict[str, Any] | None = None  # slime's, see `wants_top_p_ids`; no others

    @property
    def wants_top_p_ids(self) -> bool:
        """Whether the tokens that truncation left are asked for, in slime's form."""
        return bool((self.custom_params or {}).get("return_top_p_token_ids"))

    def to_params(self, *, seed: int, max_context_len: int, **asked: Any) -> SamplingParams:
        """Raises InvalidInputError.

        Args:
            seed: where none came along.
            asked: fields of SamplingParams that the body has beside these.
        """
        refuse_unknown(self.model_extra, _HARMLESS_SAMPLING, "sampling_params.")
        refuse_unknown(
            self.custom_params, {"return_top_p_token_ids"}, "sampling_params.custom_params."
        )
        given = our_fields({name: getattr(self, name) for name in type(self).model_fields})
        # A context is never longer, and counts beyond all sizes would meet arrays of 32 bits.
        most = max_context_len if self.max_new_tokens is None else self.max_new_tokens
        least = self.min_new_tokens or 0
        temperature = 1.0 if self.temperature is None else self.temperature
        if not 0 <= least <= most:
            raise InvalidInputError("min_new_tokens", least, f"must be in [0, {most}]")
        if given.get("top_k", 0) > _MAX_TOP_K:
            del given["top_k"]
        given |= {
            "temperature": 0.0 if 0 <= temperature < _GREEDY_BELOW else temperature,
            "logit_bias": biases_by_id(self.logit_bias, "sampling_params.logit_bias"),
            "stop_token_ids": [token for token in self.stop_token_ids or [] if token is not None],
            "max_new_tokens": min(max(most, 1), max_context_len),
            "min_new_tokens": min(least, max_context_len),
            "seed": self._seed(seed),
        }
        params = SamplingParams(**given, n=1 if self.n is None else self.n, **asked)
        tells_mask = params.sampling_mask or (self.wants_top_p_ids and params.truncates)
        return replace(params, sampling_mask=tells_mask)

    @property
    def generates(self) -> bool:
        return self.max_new_tokens != 0

    def _seed(self, default: int) -> int:
        if None not in (self.seed, self.sampling_seed) and self.seed != self.sampling_seed:
            raise InvalidInputError(
                "sampling_params.seed", self.seed, "differs from sampling_seed: give one"
            )
        given = self.sampling_seed if self.seed is None else self.seed
        return default if given is None else given
