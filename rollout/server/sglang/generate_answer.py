"""Rollouts in sglang's words."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.stopping import completed_stop, cut_at_stop
from rollout.engine.tokenizer import PromptEncoder
from rollout.server.sglang.generate_body import GenerateItem
from rollout.types import FinishReason, Rollout, TokenExtras

_LOWEST = -3.4e38  # JSON has no infinity


class AnswerWriter:
    """Writes rollouts in the shape that clients of sglang read."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder

    def text(self, item: GenerateItem, rollout: Rollout) -> str:
        """The text without its end, a stop token or a stop string, unless ``no_stop_trim``."""
        if self._encoder.tokenizer is None:
            return ""
        skips = item.skip_special_tokens
        decode = self._encoder.decode if skips else self._encoder.decode_with_specials
        ids = rollout.token_ids
        if item.no_stop_trim or rollout.finish_reason is not FinishReason.STOP:
            return decode(ids)
        if isinstance(self._matched(item, rollout), int):
            return decode(ids[:-1])
        return cut_at_stop(decode(ids), len(decode(ids[:-1])), item.params.stop)

    def answer(
        self,
        item: GenerateItem,
        rollout: Rollout,
        prompt_logprobs: dict[str, Any],
        weight_version: int,
        seconds: float,
    ) -> dict[str, Any]:
        """``weight_version``: the engine's, for a rollout without tokens."""
        meta = self.meta_info(item, rollout, weight_version)
        return {
            "text": self.text(item, rollout),
            "output_ids": rollout.token_ids,
            "meta_info": {**meta, "e2e_latency": seconds, **prompt_logprobs},
        }

    def meta_info(
        self, item: GenerateItem, rollout: Rollout, weight_version: int
    ) -> dict[str, Any]:
        """All that is told of a sample that has ended, beside its tokens and its text."""
        stats, count = rollout.stats, len(rollout.token_ids)
        versions = rollout.weight_versions
        return {
            **self.meta(item, rollout.sample_index, versions or [weight_version], count),
            "finish_reason": self._finish_reason(item, rollout),
            "cached_tokens": stats.cached_tokens,
            "weight_versions": [
                {"version": str(version), "start": start, "end": end}
                for version, start, end in rollout.weight_version_spans
            ],
            "num_retractions": stats.preemptions,
            "request_seed": rollout.seed,
            "spec_verify_ct": stats.verify_steps,
            "spec_accept_token_num": stats.accepted,
            "spec_draft_token_num": stats.drafted,
            "spec_accept_length": stats.accept_length,
            "spec_accept_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
            **self.output_logprobs(item, rollout.token_ids, rollout.logprobs, rollout.extras),
            **_routed_experts(item, rollout),
        }

    def scored(
        self,
        item: GenerateItem,
        prompt_logprobs: dict[str, Any],
        weight_version: int,
        seconds: float,
    ) -> dict[str, Any]:
        """The answer to a prompt for which nothing is generated."""
        meta = {
            **self.meta(item, 0, [weight_version], 0),
            "finish_reason": {"type": "length", "length": 0},
            "cached_tokens": 0,
            "e2e_latency": seconds,
            **self.output_logprobs(item, [], [], TokenExtras()),
            **prompt_logprobs,
        }
        return {"text": "", "output_ids": [], "meta_info": meta}

    def meta(
        self, item: GenerateItem, sample_index: int, versions: Sequence[int], count: int
    ) -> dict[str, Any]:
        """The meta information of a sample, known from its first token on."""
        return {
            "id": item.sample_rid(sample_index),
            "finish_reason": None,
            "prompt_tokens": len(item.prompt_ids),
            "completion_tokens": count,
            "weight_version": str(versions[-1]),
            "seed": item.params.seed,
        }

    def output_logprobs(
        self,
        item: GenerateItem,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        extras: TokenExtras,
    ) -> dict[str, Any]:
        """Logprobs of the tokens that were generated, and the sampling mask, where they are asked
        for."""
        found = _sampling_mask(item, extras)
        if not item.return_logprob:
            return found
        found["output_token_logprobs"] = self._triples(item, logprobs, token_ids)
        found["output_token_logprobs_length"] = len(token_ids)
        if item.params.top_logprobs:
            found["output_top_logprobs"] = self._lists(item, extras.top_logprobs)
        if item.params.logprob_token_ids:
            found["output_token_ids_logprobs"] = self._lists(item, extras.token_ids_logprobs)
        return found

    def prompt_logprobs(
        self, item: GenerateItem, logprobs: Sequence[float], extras: TokenExtras
    ) -> dict[str, Any]:
        """Logprobs of the prompt from ``score_from`` on; the very first token follows nothing:
        null.

        ``logprobs``: of those that follow something.
        """
        if not item.return_logprob:
            return {}
        if item.score_from is None:
            return {"input_token_logprobs": []}
        ids = item.prompt_ids[item.score_from :]
        unscored = len(ids) - len(logprobs)  # the first token of all, if it is among them
        none: list[None] = [None] * unscored
        found: dict[str, Any] = {
            "input_token_logprobs": self._triples(item, [*none, *logprobs], ids)
        }
        if item.params.top_logprobs:
            found["input_top_logprobs"] = [*none, *self._lists(item, extras.top_logprobs)]
        if item.params.logprob_token_ids:
            listed = self._lists(item, extras.token_ids_logprobs)
            found["input_token_ids_logprobs"] = [*none, *listed]
        return found

    def _lists(
        self, item: GenerateItem, logprobs: Sequence[Sequence[tuple[int, float]]]
    ) -> list[list[list[Any]]]:
        return [
            self._triples(
                item,
                [max(logprob, _LOWEST) for _, logprob in pairs],
                [token for token, _ in pairs],
            )
            for pairs in logprobs
        ]

    def _triples(
        self, item: GenerateItem, logprobs: Sequence[float | None], token_ids: Sequence[int]
    ) -> list[list[Any]]:
        spells = item.text_in_logprobs and self._encoder.tokenizer is not None
        spell = self._encoder.decode_with_specials
        return [
            [logprob, token, spell([token]) if spells else None]
            for logprob, token in zip(logprobs, token_ids, strict=True)
        ]

    def _finish_reason(self, item: GenerateItem, rollout: Rollout) -> dict[str, Any]:
        match rollout.finish_reason:
            case FinishReason.STOP:
                return {"type": "stop", "matched": self._matched(item, rollout)}
            case FinishReason.LENGTH:
                return {"type": "length", "length": len(rollout.token_ids)}
            case FinishReason.ABORT:
                return {"type": "abort", "message": "aborted: resubmit with what there is"}
            case FinishReason.ERROR:
                return {"type": "abort", "message": rollout.error, "status_code": 500}

    def _matched(self, item: GenerateItem, rollout: Rollout) -> int | str:
        """The stop string, or the last token, that ended it."""
        params, ids = item.params, rollout.token_ids
        if ids[-1] in params.stop_token_ids or not params.stop:
            return ids[-1]
        return completed_stop(params.stop, ids, self._encoder.decode_with_specials) or ids[-1]


def _sampling_mask(item: GenerateItem, extras: TokenExtras) -> dict[str, Any]:
    """The tokens that truncation left at each position: in sglang's form, and in slime's, which is
    the bytes of all of them and of the offsets at which each position's begin."""
    found: dict[str, Any] = {}
    masks = extras.sampling_masks
    if item.top_p_ids and item.params.sampling_mask:
        offsets = np.cumsum([0, *map(len, masks)])
        found["top_p_token_ids"] = _int32_bytes(np.array(list(chain.from_iterable(masks))))
        found["top_p_token_offsets"] = _int32_bytes(offsets)
    if item.params.sampling_mask and item.params.sampling_logprobs:
        found["output_token_sampling_mask"] = masks
        found["output_token_sampling_mask_length"] = len(masks)
        found["output_token_sampling_logprobs"] = extras.sampling_logprobs
    return found


def _int32_bytes(values: NDArray) -> str:
    return base64.b64encode(values.astype(np.int32).tobytes()).decode("ascii")


def _routed_experts(item: GenerateItem, rollout: Rollout) -> dict[str, str]:
    """The bytes of int32 [positions, sparse layers, experts per token], as trainers read them."""
    if rollout.routed_experts is None:
        return {}
    return {"routed_experts": _int32_bytes(rollout.routed_experts[item.routes_from :])}
