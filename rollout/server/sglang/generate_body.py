"""The body of `/generate`, taken apart into one `GenerateItem` per prompt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import our_fields
from rollout.server.body_fields import Biases, KnownIds, Listed, biases_by_id, refuse_unknown
from rollout.server.serving import Serving
from rollout.server.streams import SampleRequest
from rollout.types import Prompt, SamplingParams

T = TypeVar("T")

_LONGEST_RID = 1024  # characters; every sample of a call has a name of its own that begins with it
_HARMLESS = frozenset(
    {
        # Where a request runs, and next to what:
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "conversation_id",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "extra_key",
        "priority",
        "routed_dp_rank",
        "routing_key",
        "session_id",
        # What is noted of it:
        "external_trace_header",
        "log_metrics",
        "no_logs",
        "return_bytes",
        "sampling_logprobs_mode",
        "use_audio_in_video",
    }
)
_HARMLESS_SAMPLING = frozenset(
    {
        "custom_params",  # for a custom logit processor, which is refused
        "spaces_between_special_tokens",  # the tokenizer's own spacing stays
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
    json_schema: str | None = None
    regex: str | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None  # the same
    request_seed: int | None = None  # ours: a sample's own, as meta_info tells it

    def to_params(
        self, *, seed: int, max_context_len: int, top_logprobs: int, routed_experts: bool
    ) -> SamplingParams:
        """Raises InvalidInputError. ``seed``: where none came along."""
        refuse_unknown(self.model_extra, _HARMLESS_SAMPLING, "sampling_params.")
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
        return SamplingParams(
            **given,
            n=1 if self.n is None else self.n,
            top_logprobs=top_logprobs,
            routed_experts=routed_experts,
        )

    @property
    def generates(self) -> bool:
        """Tokens are asked for, not the prompt's score alone."""
        return self.max_new_tokens != 0

    def _seed(self, default: int) -> int:
        if None not in (self.seed, self.sampling_seed) and self.seed != self.sampling_seed:
            raise InvalidInputError(
                "sampling_params.seed", self.seed, "differs from sampling_seed: give one"
            )
        given = self.sampling_seed if self.seed is None else self.seed
        return default if given is None else given


class GenerateBody(BaseModel):
    """One prompt, or several: then every field may be a list with a value for each."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: str | Listed[str] | None = None
    input_ids: Annotated[Listed[int] | Listed[Listed[int]], KnownIds] | None = None
    sampling_params: SglangSamplingBody | Listed[SglangSamplingBody] | None = None
    rid: str | Listed[str] | None = None
    stream: bool = False
    return_logprob: bool | Listed[bool] | None = None
    logprob_start_len: int | Listed[int] | None = None  # -1: no prompt token is scored
    top_logprobs_num: int | Listed[int] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | list[bool] | None = None
    routed_experts_start_len: int | list[int] | None = None  # a position of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateItem:
    """One prompt, with all that is asked of it."""

    rid: str
    prompt_ids: list[int]
    prompt_index: int
    params: SamplingParams
    request_seed: int | None
    generates: bool  # else the prompt is scored alone
    skip_special_tokens: bool
    no_stop_trim: bool
    return_logprob: bool
    score_from: int | None  # the first prompt token whose logprob is asked for
    text_in_logprobs: bool
    routes_from: int  # the first position whose experts are told, where they are

    def sample_rid(self, sample_index: int) -> str:
        """The name to abort that sample by."""
        return self.rid if self.params.n == 1 else f"{self.rid}_{sample_index}"

    def samples(self) -> list[SampleRequest]:
        """The samples to generate; none for a prompt that is only scored."""
        return [
            SampleRequest(
                prompt_ids=self.prompt_ids,
                params=self.params,
                prompt_index=self.prompt_index,
                sample_index=index,
                request_seed=self.request_seed,
                rid=self.sample_rid(index),
            )
            for index in range(self.params.n if self.generates else 0)
        ]


async def generate_items(body: GenerateBody, serving: Serving) -> tuple[list[GenerateItem], bool]:
    """The items, and whether the answer is one object rather than a list.

    Raises InvalidInputError.
    """
    refuse_unknown(body.model_extra, _HARMLESS)
    prompts, is_single = _prompts(body)
    count = len(prompts)
    serving.require_batch(count)
    sampling = _each(body.sampling_params, count, "sampling_params", SglangSamplingBody())
    wants_logprob = _each(body.return_logprob, count, "return_logprob", False)
    starts = _each(body.logprob_start_len, count, "logprob_start_len", -1)
    tops = _each(body.top_logprobs_num, count, "top_logprobs_num", 0)
    wants_routes = _each(body.return_routed_experts, count, "return_routed_experts", False)
    routes_from = _each(body.routed_experts_start_len, count, "routed_experts_start_len", 0)
    rids = _rids(body.rid, count, is_single)
    seed = serving.fresh_seed()  # of all prompts that bring none: their indices tell them apart
    # One for all prompts that ask for the same.
    known: dict[tuple[int, int, bool], SamplingParams] = {}

    def params_of(each: SglangSamplingBody, top_logprobs: int, routes: bool) -> SamplingParams:
        key = (id(each), top_logprobs, routes)
        if key not in known:
            known[key] = each.to_params(
                seed=seed,
                max_context_len=serving.max_context_len,
                top_logprobs=top_logprobs,
                routed_experts=routes,
            )
        return known[key]

    params = [
        params_of(each, top if wanted else 0, routes)
        for each, top, wanted, routes in zip(
            sampling, tops, wants_logprob, wants_routes, strict=True
        )
    ]
    serving.require_batch(sum(each.n for each in params))
    field = "input_ids" if body.text is None else "text"
    all_ids = await serving.encode(prompts, field)
    items = [
        GenerateItem(
            rid=rids[index],
            prompt_ids=prompt_ids,
            prompt_index=index,
            params=params[index],
            request_seed=_request_seed(sampling[index], params[index]),
            generates=sampling[index].generates,
            skip_special_tokens=sampling[index].skip_special_tokens is not False,
            no_stop_trim=bool(sampling[index].no_stop_trim),
            return_logprob=wants_logprob[index],
            score_from=_score_from(starts[index], wants_logprob[index], prompt_ids),
            text_in_logprobs=bool(body.return_text_in_logprobs),
            routes_from=_check_start("routed_experts_start_len", routes_from[index], 0, prompt_ids),
        )
        for index, prompt_ids in enumerate(all_ids)
    ]
    return items, is_single and items[0].params.n == 1


def _prompts(body: GenerateBody) -> tuple[Sequence[Prompt], bool]:
    """The prompts, and whether there was one that came alone."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidInputError("text", None, "give either text or input_ids")
    given: Any = body.input_ids if body.text is None else body.text
    is_batch = isinstance(given, list) and bool(given) and isinstance(given[0], (str, list))
    is_empty_batch = body.text == []
    return (given, False) if is_batch or is_empty_batch else ([given], True)


def _each(value: T | list[T] | None, count: int, field: str, default: T) -> list[T]:
    """The values as one per prompt. Raises InvalidInputError for a list of another length."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidInputError(field, f"{len(value)} values", f"must be one, or {count}: one each")
    return value


def _rids(rid: str | list[str] | None, count: int, is_single: bool) -> list[str]:
    base = uuid.uuid4().hex if rid is None else rid
    for each in [base] if isinstance(base, str) else base:
        if not 0 < len(each) <= _LONGEST_RID:
            raise InvalidInputError("rid", each, f"must be 1 to {_LONGEST_RID} characters")
    if isinstance(base, str) and not is_single:
        return [f"{base}_{index}" for index in range(count)]
    return _each(base, count, "rid", "")


def _request_seed(sampling: SglangSamplingBody, params: SamplingParams) -> int | None:
    if sampling.request_seed is not None and params.n != 1:
        raise InvalidInputError(
            "sampling_params.request_seed", sampling.request_seed, "is one sample's: needs n=1"
        )
    return sampling.request_seed


def _score_from(start: int, wanted: bool, prompt_ids: list[int]) -> int | None:
    _check_start("logprob_start_len", start, -1, prompt_ids)
    return start if wanted and start >= 0 else None


def _check_start(field: str, start: int, least: int, prompt_ids: list[int]) -> int:
    if not least <= start <= len(prompt_ids):
        raise InvalidInputError(
            field, start, f"must be in [{least}, {len(prompt_ids)}] of this prompt"
        )
    return start
