"""Rollouts as answers of SGLang's `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.engine.stopping import cut_at_stop
from rollout.server.sglang.generate_body import GenerateItem
from rollout.server.sglang.meta_info import MetaInfoWriter
from rollout.types import FinishReason, Rollout, TokenExtras


class AnswerWriter(MetaInfoWriter):
    """Writes rollouts in the shape that clients of sglang read."""

    def text(self, item: GenerateItem, rollout: Rollout) -> str:
        """The text without its end, a stop token or a stop string, unless ``no_stop_trim``."""
        if self._encoder.tokenizer is None:
            return ""
        skips = item.skip_special_tokens
        decode = self._encoder.decode if skips else self._encoder.decode_with_specials
        ids = rollout.token_ids
        if item.no_stop_trim or rollout.finish_reason is not FinishReason.STOP:
            return decode(ids)
        if isinstance(rollout.matched_stop, int):
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

    def prompt_logprobs(
        self, item: GenerateItem, logprobs: Sequence[float], extras: TokenExtras
    ) -> dict[str, Any]:
        """Logprobs of the prompt from ``score_from`` on; the very first token follows nothing:
        null.

        ``logprobs``: of the tokens after the first.
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
