"""The parts that all answers share: usage, choices and their text."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from rollout.engine.stopping import cut_at_stop
from rollout.engine.tokenizer import PromptEncoder
from rollout.server.json_route import json_bytes
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.server.serving import Serving
from rollout.server.streams import DeltaStream, SampleRequest, while_connected
from rollout.server.text_stream import Detokenizer, TextStream
from rollout.types import FinishReason, Rollout


class OutputTexts:
    """One for any number of bodies. Without a tokenizer every text is empty."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._detokenizers: dict[bool, Detokenizer] = {}  # by whether special tokens are left out
        if encoder.tokenizer is not None:
            self._detokenizers = {
                skips: Detokenizer(encoder.tokenizer, skips) for skips in (True, False)
            }

    def detokenizer(self, body: OpenAISamplingBody) -> Detokenizer | None:
        return self._detokenizers.get(body.skip_special_tokens is not False)

    def stream(self, body: OpenAISamplingBody, stop: Sequence[str]) -> TextStream:
        """Its `finish` wants what `whole` gives."""
        return TextStream(self.detokenizer(body), stop)

    def whole(self, body: OpenAISamplingBody, stop: Sequence[str], rollout: Rollout) -> str:
        if rollout.text is None:
            return ""
        skips = body.skip_special_tokens is not False
        if skips and not body.include_stop_str_in_output:
            return rollout.text
        decode = self._encoder.decode if skips else self._encoder.decode_with_specials
        text = decode(rollout.token_ids)
        if rollout.finish_reason is not FinishReason.STOP:
            return text
        before = cut_at_stop(text, len(decode(rollout.token_ids[:-1])), stop)
        if before == text or not body.include_stop_str_in_output:
            return before
        return before + max((each for each in stop if text.startswith(each, len(before))), key=len)


@dataclass(frozen=True, slots=True)
class Heading:
    """The fields that all chunks of one answer repeat."""

    id: str
    object: str  # its kind
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Heading:
        return cls(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)

    def over(
        self, choices: list[dict[str, Any]], weight_versions: Iterable[int], **fields: Any
    ) -> dict[str, Any]:
        """``weight_versions``: of the tokens in it; the newest is the fingerprint."""
        newest = max(weight_versions, default=None)
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None if newest is None else f"weights-{newest}",
            "choices": choices,
            **fields,
        }


def usage(prompt_lens: Sequence[int], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Tokens of each prompt once, whatever n; speculation's counters under sglang's names."""
    completion_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    firsts = [rollout for rollout in rollouts if rollout.sample_index == 0]
    return {
        "prompt_tokens": sum(prompt_lens),
        "completion_tokens": completion_tokens,
        "total_tokens": sum(prompt_lens) + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(rollout.stats.cached_tokens for rollout in firsts)
        },
        "spec_verify_ct": sum(rollout.stats.verify_steps for rollout in rollouts),
        "spec_draft_token_num": sum(rollout.stats.drafted for rollout in rollouts),
        "spec_accept_token_num": sum(rollout.stats.accepted for rollout in rollouts),
    }


def finish(rollout: Rollout) -> dict[str, Any]:
    """How a choice ends: beside OpenAI's reasons ``abort`` and ``error``, which it does not have.

    ``weight_versions``: spans ``[version, start, end]`` of the choice's tokens.
    """
    fields: dict[str, Any] = {
        "finish_reason": str(rollout.finish_reason),
        "weight_versions": [list(span) for span in rollout.weight_version_spans],
    }
    return fields if rollout.error is None else {**fields, "error": rollout.error}


async def json_response(build: Callable[[], dict[str, Any]]) -> Response:
    """Built and written off the event loop: answers may be long."""

    def content() -> bytes:
        return json_bytes(build())

    return Response(await asyncio.to_thread(content), media_type="application/json")


async def stream_while_connected(
    request: Request, serving: Serving, samples: Sequence[SampleRequest]
) -> DeltaStream:
    """Once it has something to say, so that what is wrong with the request has its status."""
    deltas = serving.stream(samples)
    try:
        await while_connected(request, deltas.ready())
    except BaseException:
        await deltas.aclose()
        raise
    return deltas
