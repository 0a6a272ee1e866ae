"""``sampling_params``: sglang's names for how a prompt is sampled, and a few of ours."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from rollout.errors import InvalidInputError
from rollout.sampling_names import our_fields
from rollout.server.body_fields import Biases, Listed, refuse_unknown
from rollout.types import SamplingParams

_HARMLESS = frozenset(
    {
        "custom_params",  # for a custom logit processor, which is refused
        "spaces_between_special_tokens",  # the tokenizer's own spacing is kept
        "stream_interval",  # events come as often as the reader takes them
    }
)
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
    stop_token_ids: Listed[int | None] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None  # the same
    request_seed: int | None = None  # ours: a sample's own, as meta_info tells it

    def to_params(
        self,
        *,
        fresh_seed: Callable[[], int],
        max_context_len: int,
        top_logprobs: int,
        routed_experts: bool,
    ) -> SamplingParams:
        """Raises InvalidInputError. ``fresh_seed`` is asked where none came along."""
        refuse_unknown(self.model_extra, _HARMLESS, "sampling_params.")
        given = our_fields({name: getattr(self, name) for name in type(self).model_fields})
        # A context is never longer, and counts beyond all sizes would meet arrays of 32 bits.
        most = max_context_len if self.max_new_tokens is None else self.max_new_tokens
        least = self.min_new_tokens or 0
        if not 0 <= least <= most:
            raise InvalidInputError("min_new_tokens", least, f"must be in [0, {most}]")
        if given.get("top_k", 0) > _MAX_TOP_K:
            del given["top_k"]
        given |= {
            "temperature": self._temperature(),
            "logit_bias": self._logit_bias(),
            "stop_token_ids": [token for token in self.stop_token_ids or [] if token is not None],
            "max_new_tokens": min(max(most, 1), max_context_len),
            "min_new_tokens": min(least, max_context_len),
            "seed": self._seed(fresh_seed),
        }
        return SamplingParams(
            **given,
            n=1 if self.n is None else self.n,
            top_logprobs=top_logprobs,
            routed_experts=routed_experts,
        )

    @property
    def generates(self) -> bool:
        return self.max_new_tokens != 0

    def _temperature(self) -> float:
        if self.temperature is None:
            return 1.0
        return 0.0 if 0 <= self.temperature < _GREEDY_BELOW else self.temperature

    def _logit_bias(self) -> dict[int, float]:
        try:
            return {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise InvalidInputError(
                "sampling_params.logit_bias", list(self.logit_bias or {}), "names tokens by id"
            ) from None

    def _seed(self, fresh_seed: Callable[[], int]) -> int:
        seeds = {seed for seed in (self.seed, self.sampling_seed) if seed is not None}
        if len(seeds) > 1:
            raise InvalidInputError(
                "sampling_params.seed", self.seed, "differs from sampling_seed: give one"
            )
        return seeds.pop() if seeds else fresh_seed()
