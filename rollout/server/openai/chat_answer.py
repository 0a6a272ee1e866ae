"""What `POST /v1/chat/completions` answers, whole or in parts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.server.delta_stream import DeltaStream
from rollout.server.openai.answer import Heading, finish, usage
from rollout.server.openai.chat_body import ChatBody
from rollout.server.openai.logprobs import LogprobWriter, ScoredTokens
from rollout.server.openai.output_text import OutputTexts
from rollout.server.samples import Delta, SampleRequest
from rollout.types import Rollout

_ROLE = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    heading: Heading
    body: ChatBody
    samples: Sequence[SampleRequest]  # one for each choice
    writer: LogprobWriter
    texts: OutputTexts

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": _ROLE, "content": self._text(rollout), "refusal": None},
                **self._of_tokens(rollout),
                **finish(rollout),
            }
            for index, rollout in enumerate(rollouts)
        ]
        versions = [version for rollout in rollouts for version in rollout.weight_versions]
        return self.heading.over(
            choices, versions, usage=self._usage(rollouts), **self._prompt_fields()
        )

    async def parts(self, deltas: DeltaStream) -> AsyncGenerator[dict[str, Any], None]:
        heading = replace(self.heading, object="chat.completion.chunk")
        texts = [self.texts.stream(self.body, sample.params.stop) for sample in self.samples]
        no_usage = {"usage": None} if self.body.wants_usage else {}
        rollouts: dict[int, Rollout] = {}
        begin = {"role": _ROLE, "content": "", "refusal": None}
        for index in range(len(self.samples)):
            yield heading.over([_part(index, begin)], [], **no_usage, **self._prompt_fields())
        async for delta in deltas:
            text = texts[delta.index].push(delta.token_ids)
            if delta.rollout is not None:
                rollouts[delta.index] = delta.rollout
                text += texts[delta.index].finish(self._text(delta.rollout))
            part = _part(delta.index, {"content": text} if text else {}) | self._of_tokens(delta)
            if delta.rollout is not None:
                part |= finish(delta.rollout)
            elif not (text or self.body.logprobs or self.body.return_token_ids):
                continue
            yield heading.over([part], delta.weight_versions, **no_usage)
        if self.body.wants_usage:
            ended = [rollouts[index] for index in range(len(rollouts))]
            versions = [version for rollout in ended for version in rollout.weight_versions]
            yield heading.over([], versions, usage=self._usage(ended))

    def _text(self, rollout: Rollout) -> str:
        return self.texts.whole(self.body, self.samples[0].params.stop, rollout)

    def _of_tokens(self, tokens: Rollout | Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs:
            fields["logprobs"] = self.writer.of_chat(ScoredTokens.of(tokens))
        if self.body.return_token_ids:
            fields["token_ids"] = list(tokens.token_ids)
        return fields

    def _prompt_fields(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.samples[0].prompt_ids)}

    def _usage(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        return usage([len(self.samples[0].prompt_ids)], rollouts)


def _part(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
