"""The common part of completions and chats: texts, usage, and answers whole or in parts."""

from __future__ import annotations

import base64
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any, Generic, TypeVar

import numpy as np
from fastapi import Request, Response

from rollout.engine.stopping import cut_at_stop
from rollout.engine.tokenizer import PromptEncoder
from rollout.server.openai.logprobs import LogprobWriter, TokenSpelling
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.server.respond import respond
from rollout.server.serving import Serving
from rollout.server.streams import Delta, DeltaStream, SampleRequest, with_rid
from rollout.server.text_stream import TextStreams
from rollout.server.version_labels import VersionLabels
from rollout.types import EmittedTokens, FinishReason, Rollout

BodyType = TypeVar("BodyType", bound=OpenAISamplingBody)


class OutputTexts:
    """The texts of answers and of their tokens. Without a tokenizer every text is empty."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.spelling = TokenSpelling(encoder.tokenizer)
        self.streams = TextStreams(encoder.tokenizer)

    def whole(
        self,
        body: OpenAISamplingBody,
        stop: Sequence[str],
        rollout: Rollout,
        shown_ids: frozenset[int],
    ) -> str:
        """The rollout's text, as the body asks for it; ``shown_ids``: see `Detokenizer`."""
        detokenizer = self.streams.detokenizer(body.skips_special_tokens, shown_ids)
        if rollout.text is None or detokenizer is None:
            return ""
        if detokenizer.skips_all and not body.include_stop_str_in_output:
            return rollout.text
        decode = detokenizer.decode
        text = decode(rollout.token_ids)
        if rollout.finish_reason is not FinishReason.STOP:
            return text
        before = cut_at_stop(text, len(decode(rollout.token_ids[:-1])), stop)
        if before == text or not body.include_stop_str_in_output:
            return before
        return before + max((each for each in stop if text.startswith(each, len(before))), key=len)


@dataclass(frozen=True, slots=True)
class Heading:
    id: str
    object: str  # its kind
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, request_id: str | None) -> Heading:
        """``request_id``: the client's name for the call; None: a new one."""
        name = uuid.uuid4().hex if request_id is None else request_id
        return cls(f"{prefix}-{name}", kind, int(time.time()), model)

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


def finish(rollout: Rollout, routes_from: int = 0) -> dict[str, Any]:
    """The fields that end a choice. ``abort`` and ``error`` are reasons that OpenAI does not have.

    ``weight_versions``: spans ``[version, start, end]`` of the choice's tokens. ``routed_experts``,
    where they were asked for: numpy's file of them in base64, as vLLM has it, from position
    ``routes_from`` on.
    """
    fields: dict[str, Any] = {
        "finish_reason": str(rollout.finish_reason),
        "weight_versions": [list(span) for span in rollout.weight_version_spans],
    }
    if rollout.error is not None:
        fields["error"] = rollout.error
    if rollout.routed_experts is not None:
        file = BytesIO()
        np.save(file, rollout.routed_experts[routes_from:].astype(np.int32))
        fields["routed_experts"] = base64.b64encode(file.getvalue()).decode("ascii")
    return fields


def sampling_mask(tokens: EmittedTokens, is_asked: bool | None) -> dict[str, Any]:
    """vLLM's field for the tokens that truncation left at each position; none where not asked."""
    return {"sampling_mask": list(tokens.extras.sampling_masks)} if is_asked else {}


WritePart = Callable[[str, Delta], dict[str, Any] | None]
"""Makes a choice's next part from the text that may be shown and the new tokens; None if it would
say nothing."""


@dataclass(frozen=True, kw_only=True)
class Answer(ABC, Generic[BodyType]):
    heading: Heading
    body: BodyType
    samples: Sequence[SampleRequest]  # one for each choice
    texts: OutputTexts
    labels: VersionLabels
    shown_ids: frozenset[int] = frozenset()  # special tokens in texts, though others are skipped

    @cached_property
    def writer(self) -> LogprobWriter:
        """Writes tokens as the body asks for them."""
        return LogprobWriter(self.texts.spelling, bool(self.body.return_tokens_as_token_ids))

    @abstractmethod
    def choice(self, index: int, rollout: Rollout) -> dict[str, Any]:
        """A choice of a whole answer."""

    @abstractmethod
    def part_writers(self) -> list[WritePart]:
        """The writers of parts, one for each choice."""

    @property
    def part_heading(self) -> Heading:
        return self.heading

    def openings(self) -> list[dict[str, Any]]:
        """Fields of the parts that come before the first token's."""
        return []

    def answer_fields(self) -> dict[str, Any]:
        """Fields that are said once, beside the choices."""
        return {}

    def finish(self, index: int, rollout: Rollout) -> dict[str, Any]:
        """The fields that end a choice, and what it stopped at: sglang's ``matched_stop``, and
        vLLM's ``stop_reason``, which is null at the model's own end."""
        matched = rollout.matched_stop
        is_asked = isinstance(matched, str) or matched in self.samples[index].params.stop_token_ids
        reason = matched if is_asked else None
        return finish(rollout) | {"matched_stop": matched, "stop_reason": reason}

    def text(self, index: int, rollout: Rollout) -> str:
        stop = self.samples[index].params.stop
        return self.texts.whole(self.body, stop, rollout, self.shown_ids)

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        choices = [self.choice(index, rollout) for index, rollout in enumerate(rollouts)]
        usage = self.usage(rollouts)
        first = rollouts[0].weight_versions
        metadata = {
            "weight_version": self.labels.of(first[-1]) if first else None,
            "weight_versions": self.labels.spans(rollouts[0]),
        }
        return self.heading.over(
            choices, _versions(rollouts), usage=usage, metadata=metadata, **self.answer_fields()
        )

    async def parts(self, deltas: DeltaStream) -> AsyncGenerator[dict[str, Any], None]:
        heading, write = self.part_heading, self.part_writers()
        skips = self.body.skips_special_tokens
        texts = [
            self.texts.streams.open(skips, sample.params.stop, self.shown_ids)
            for sample in self.samples
        ]
        no_usage: dict[str, Any] = {"usage": None} if self.body.wants_usage else {}
        rollouts: dict[int, Rollout] = {}
        for opening in self.openings():
            yield heading.over([opening], [], **no_usage, **self.answer_fields())
        options, counts = self.body.stream_options, [0] * len(self.samples)
        async for delta in deltas:
            counts[delta.index] += len(delta.tokens.token_ids)
            text = texts[delta.index].push(delta.tokens.token_ids)
            if delta.rollout is not None:
                rollouts[delta.index] = delta.rollout
                text += texts[delta.index].finish(self.text(delta.index, delta.rollout))
            part = write[delta.index](text, delta)
            usage = no_usage
            if options is not None and options.of_parts:
                prompt_len = len(self.samples[delta.index].prompt_ids)
                usage = {"usage": token_counts(prompt_len, counts[delta.index])}
            if part is not None:
                yield heading.over([part], delta.tokens.weight_versions, **usage)
        if self.body.wants_usage:
            ended = [rollouts[index] for index in range(len(rollouts))]
            yield heading.over([], _versions(ended), usage=self.usage(ended))

    def usage(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Tokens of each prompt once, whatever n; speculation's counters under sglang's names."""
        prompts = self.samples[:: self.body.num_samples]
        prompt_tokens = sum(len(sample.prompt_ids) for sample in prompts)
        completion_tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        firsts = [rollout for rollout in rollouts if rollout.sample_index == 0]
        return {
            **token_counts(prompt_tokens, completion_tokens),
            "prompt_tokens_details": {
                "cached_tokens": sum(rollout.stats.cached_tokens for rollout in firsts)
            },
            "spec_verify_ct": sum(rollout.stats.verify_steps for rollout in rollouts),
            "spec_draft_token_num": sum(rollout.stats.drafted for rollout in rollouts),
            "spec_accept_token_num": sum(rollout.stats.accepted for rollout in rollouts),
        }

    async def respond(self, request: Request, serving: Serving) -> Response:
        samples = with_rid(self.samples, self.body.rid or self.body.request_id)
        parts = self.parts if self.body.stream else None
        return await respond(request, serving, samples, self.whole, parts)


def token_counts(prompt_len: int, output_len: int) -> dict[str, int]:
    """The fields of every ``usage``."""
    return {
        "prompt_tokens": prompt_len,
        "completion_tokens": output_len,
        "total_tokens": prompt_len + output_len,
    }


def _versions(rollouts: Sequence[Rollout]) -> list[int]:
    return [version for rollout in rollouts for version in rollout.weight_versions]
