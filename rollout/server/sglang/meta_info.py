"""SGLang's `meta_info`: facts on a sample beside its tokens and its text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.tokenizer import PromptEncoder
from rollout.server.version_labels import VersionLabels
from rollout.types import FinishReason, Rollout, SamplingParams, TokenExtras

_LOWEST = -3.4e38  # JSON has no infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaInfoOptions:
    """The samples of one prompt, and the options of their `meta_info`."""

    rid: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    return_logprob: bool = False
    top_p_ids: bool = False  # the sampling mask is told in slime's form
    text_in_logprobs: bool = False
    routes_from: int = 0  # the first position whose experts are told, where they are

    def sample_rid(self, sample_index: int) -> str:
        return self.rid if self.params.n == 1 else f"{self.rid}_{sample_index}"


class MetaInfoWriter:
    def __init__(self, encoder: PromptEncoder, labels: VersionLabels) -> None:
        self._encoder = encoder
        self._labels = labels

    def meta_info(
        self, asked: MetaInfoOptions, rollout: Rollout, weight_version: int
    ) -> dict[str, Any]:
        """All that is told of a sample that has ended, beside its tokens and its text."""
        stats, count = rollout.stats, len(rollout.token_ids)
        versions = rollout.weight_versions or [weight_version]
        empty = {"version": self._labels.of(weight_version), "start": 0, "end": 0}
        return {
            **self.meta(asked, rollout.sample_index, versions, count),
            "finish_reason": _finish_reason(rollout),
            "cached_tokens": stats.cached_tokens,
            "weight_versions": self._labels.spans(rollout) or [empty],
            "num_retractions": stats.preemptions,
            "request_seed": rollout.seed,
            "spec_verify_ct": stats.verify_steps,
            "spec_accept_token_num": stats.accepted,
            "spec_draft_token_num": stats.drafted,
            "spec_accept_length": stats.accept_length,
            "spec_accept_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
            **self.output_logprobs(asked, rollout.token_ids, rollout.logprobs, rollout.extras),
            **_routed_experts(asked, rollout),
        }

    def meta(
        self, asked: MetaInfoOptions, sample_index: int, versions: Sequence[int], count: int
    ) -> dict[str, Any]:
        """The meta information of a sample, known from its first token on."""
        return {
            "id": asked.sample_rid(sample_index),
            "finish_reason": None,
            "prompt_tokens": len(asked.prompt_ids),
            "completion_tokens": count,
            "weight_version": self._labels.of(versions[-1]),
            "seed": asked.params.seed,
        }

    def output_logprobs(
        self,
        asked: MetaInfoOptions,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        extras: TokenExtras,
    ) -> dict[str, Any]:
        """Logprobs of the tokens that were generated, and the sampling mask, where they are asked
        for."""
        found = _sampling_mask(asked, extras)
        if not asked.return_logprob:
            return found
        found["output_token_logprobs"] = self._triples(asked, logprobs, token_ids)
        found["output_token_logprobs_length"] = len(token_ids)
        if asked.params.top_logprobs:
            found["output_top_logprobs"] = self._lists(asked, extras.top_logprobs)
        if asked.params.logprob_token_ids:
            found["output_token_ids_logprobs"] = self._lists(asked, extras.token_ids_logprobs)
        return found

    def _lists(
        self, asked: MetaInfoOptions, logprobs: Sequence[Sequence[tuple[int, float]]]
    ) -> list[list[list[Any]]]:
        return [
            self._triples(
                asked,
                [max(logprob, _LOWEST) for _, logprob in pairs],
                [token for token, _ in pairs],
            )
            for pairs in logprobs
        ]

    def _triples(
        self, asked: MetaInfoOptions, logprobs: Sequence[float | None], token_ids: Sequence[int]
    ) -> list[list[Any]]:
        spells = asked.text_in_logprobs and self._encoder.tokenizer is not None
        spell = self._encoder.decode_with_specials
        return [
            [logprob, token, spell([token]) if spells else None]
            for logprob, token in zip(logprobs, token_ids, strict=True)
        ]


def _finish_reason(rollout: Rollout) -> dict[str, Any]:
    match rollout.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": rollout.matched_stop}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(rollout.token_ids)}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "aborted: resubmit with what there is"}
        case FinishReason.ERROR:
            return {"type": "abort", "message": rollout.error, "status_code": 500}


def _sampling_mask(asked: MetaInfoOptions, extras: TokenExtras) -> dict[str, Any]:
    """The tokens that truncation left at each position, in SGLang's form and in slime's."""
    found: dict[str, Any] = {}
    masks = extras.sampling_masks
    if asked.top_p_ids and asked.params.sampling_mask:
        offsets = np.cumsum([0, *map(len, masks)])
        found["top_p_token_ids"] = _int32_bytes(np.array(list(chain.from_iterable(masks))))
        found["top_p_token_offsets"] = _int32_bytes(offsets)
    if asked.params.sampling_mask and asked.params.sampling_logprobs:
        found["output_token_sampling_mask"] = masks
        found["output_token_sampling_mask_length"] = len(masks)
        found["output_token_sampling_logprobs"] = extras.sampling_logprobs
    return found


def _int32_bytes(values: NDArray) -> str:
    return base64.b64encode(values.astype(np.int32).tobytes()).decode("ascii")


def _routed_experts(asked: MetaInfoOptions, rollout: Rollout) -> dict[str, str]:
    """int32 [positions, sparse layers, experts per token], in base64."""
    if rollout.routed_experts is None:
        return {}
    return {"routed_experts": _int32_bytes(rollout.routed_experts[asked.routes_from :])}
