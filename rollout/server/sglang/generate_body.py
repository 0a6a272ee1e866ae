"""The body of `/generate`, taken apart into one `GenerateItem` per prompt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from rollout.errors import InvalidInputError
from rollout.server.body_fields import (
    MAX_RID_LEN,
    Listed,
    refuse_unknown,
)
from rollout.server.serving import Serving
from rollout.server.sglang.meta_info import MetaInfoOptions
from rollout.server.sglang.sampling_body import SglangSamplingBody
from rollout.server.streams import SampleRequest
from rollout.types import Prompt, SamplingParams

T = TypeVar("T")

_HARMLESS = frozenset(
    {
        # Where a request runs, and next to what
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "conversation_id",
        "data_parallel_rank", "disagg_prefill_dp_rank", "extra_key", "priority", "routed_dp_rank",
        "routing_key", "session_id",
        # How it is logged
        "external_trace_header", "log_metrics", "no_logs",
    }
)  # fmt: skip


class GenerateBody(BaseModel):
    """One prompt, or several: then every field may be a list with a value for each."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: str | Listed[str] | None = None
    input_ids: Listed[int] | Listed[Listed[int]] | None = None
    sampling_params: SglangSamplingBody | Listed[SglangSamplingBody] | None = None
    model: str | None = None
    rid: str | Listed[str] | None = None
    stream: bool = False
    return_logprob: bool | Listed[bool] | None = None
    logprob_start_len: int | Listed[int] | None = None  # -1: no prompt token is scored
    top_logprobs_num: int | Listed[int] | None = None
    token_ids_logprob: Listed[int] | Listed[Listed[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | Listed[bool] | None = None
    return_routed_experts: bool | list[bool] | None = None
    routed_experts_start_len: int | list[int] | None = None  # a position of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateItem(MetaInfoOptions):
    prompt_index: int
    request_seed: int | None
    generates: bool  # else the prompt is scored alone
    skip_special_tokens: bool
    no_stop_trim: bool
    score_from: int | None  # the first prompt token whose logprob is asked for

    def samples(self) -> list[SampleRequest]:
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
    serving.require_model(body.model)
    prompts, is_single = _prompts(body)
    count = len(prompts)
    serving.require_batch(count)
    sampling = _each(body.sampling_params, count, "sampling_params", SglangSamplingBody())
    wants_logprob = _each(body.return_logprob, count, "return_logprob", False)
    starts = _each(body.logprob_start_len, count, "logprob_start_len", -1)
    tops = _each(body.top_logprobs_num, count, "top_logprobs_num", 0)
    wants_mask = _each(body.return_sampling_mask, count, "return_sampling_mask", False)
    asked_ids: Any = body.token_ids_logprob
    if asked_ids and isinstance(asked_ids[0], int):
        asked_ids = [asked_ids] * count
    ids_each: list[list[int] | None] = _each(asked_ids or None, count, "token_ids_logprob", None)
    wants_routes = _each(body.return_routed_experts, count, "return_routed_experts", False)
    routes_from = _each(body.routed_experts_start_len, count, "routed_experts_start_len", 0)
    rids = _rids(body.rid, count, is_single)
    seed = serving.fresh_seed()  # of all prompts that bring none: their indices tell them apart
    # One for all prompts that ask for the same.
    known: dict[tuple, SamplingParams] = {}

    def params_of(index: int) -> SamplingParams:
        wanted = wants_logprob[index]
        ids = ids_each[index] or []
        if ids and not wanted:
            raise InvalidInputError("token_ids_logprob", ids, "needs return_logprob=true")
        top, mask, routes = tops[index] if wanted else 0, wants_mask[index], wants_routes[index]
        key = (id(sampling[index]), top, tuple(ids), mask, routes)
        if key not in known:
            known[key] = sampling[index].to_params(
                seed=seed,
                max_context_len=serving.max_context_len,
                top_logprobs=top,
                logprob_token_ids=ids,
                sampling_mask=mask,
                sampling_logprobs=mask,
                routed_experts=routes,
            )
        return known[key]

    params = [params_of(index) for index in range(count)]
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
            top_p_ids=sampling[index].wants_top_p_ids,
            score_from=_score_from(starts[index], wants_logprob[index], prompt_ids),
            text_in_logprobs=bool(body.return_text_in_logprobs),
            routes_from=_check_start("routed_experts_start_len", routes_from[index], 0, prompt_ids),
        )
        for index, prompt_ids in enumerate(all_ids)
    ]
    return items, is_single and items[0].params.n == 1


def _prompts(body: GenerateBody) -> tuple[Sequence[Prompt], bool]:
    """The prompts, and whether one was given outside a list."""
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
        if not 0 < len(each) <= MAX_RID_LEN:
            raise InvalidInputError("rid", each, f"must be 1 to {MAX_RID_LEN} characters")
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
