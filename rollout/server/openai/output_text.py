"""The text of a choice, as its body asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.engine.stopping import cut_at_stop
from rollout.engine.tokenizer import PromptEncoder
from rollout.server.openai.sampling_body import OpenAISamplingBody
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
