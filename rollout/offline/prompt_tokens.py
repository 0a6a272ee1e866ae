"""The prompts' token ids: text by the chat template or as it stands, checked before any work."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from functools import cached_property

from rollout.engine.protocol import Engine
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.offline.config import ChatTemplateMode, RunConfig
from rollout.offline.prompt_check import CheckedPrompts, handle_broken
from rollout.offline.prompts import BrokenRow
from rollout.types import Prompt, SamplingParams

log = logging.getLogger(__name__)


def check_tokens(checked: CheckedPrompts, engine: Engine, config: RunConfig) -> list[array[int]]:
    """Check what takes a tokenizer and the sizes of model and memory.

    Logs how the prompts were encoded, and how many of them leave too little of the context.
    Returns the token ids of ``checked.rows()``: they are what runs. Raises as `check_rows` does.
    """
    broken = []
    tokens: list[array[int]] = []
    rows = RowEncoder(engine.encoder, config.data.chat_template)
    encoded: Counter[str] = Counter()  # what was done -> prompts
    num_cut = 0
    for row in checked.rows():
        try:
            token_ids, done = rows.encode(row.prompt)
            num_cut += not _check_fits(engine, token_ids, config.sampling)
        except OutOfMemoryError as error:
            # Never skipped: the output must not depend on how much memory was free.
            raise OutOfMemoryError(f"{row.where}: {error}") from error
        except InvalidInputError as error:
            if error.field.startswith("sampling."):
                raise
            broken.append(BrokenRow(row.index, row.where, str(error)))
        else:
            tokens.append(array("i", token_ids))
            encoded[done] += 1
    handle_broken(broken, checked, config.data.on_error)
    shown = [f"{count} of {done}" for done, count in encoded.items()]
    log.info("prompts: %s", "; ".join(shown) if len(shown) > 1 else next(iter(encoded)))
    if num_cut:
        limit = "model.max_context_len" if config.model.max_context_len else "the model's limit"
        log.warning(
            "%d of %d prompts leave room for fewer than sampling.max_new_tokens=%d tokens in the "
            "context of %d (%s): their rollouts end where it is full",
            num_cut, checked.num_prompts, config.sampling.max_new_tokens, engine.max_context_len,
            limit,
        )  # fmt: skip
    return tokens


class RowEncoder:
    """Encodes prompts as ``data.chat_template`` says."""

    def __init__(self, encoder: PromptEncoder, mode: ChatTemplateMode) -> None:
        """Raises InvalidInputError if a chat template is required and the tokenizer has none."""
        self._encoder = encoder
        self._mode = mode
        if mode is ChatTemplateMode.always and not encoder.has_chat_template:
            raise InvalidInputError(
                "data.chat_template", mode.value,
                "the tokenizer has no chat template: auto or never take raw text; "
                "model.tokenizer=FOLDER names a tokenizer that has one",
            )  # fmt: skip

    def encode(self, prompt: Prompt) -> tuple[list[int], str]:
        """Token ids, and what was done, for the user. Raises what `PromptEncoder.encode` does."""
        encoded, done = self._as_encoded(prompt)
        return self._encoder.encode(encoded), done

    def _as_encoded(self, prompt: Prompt) -> tuple[Prompt, str]:
        if not isinstance(prompt, str):
            return prompt, "chat messages" if isinstance(prompt[0], dict) else "token ids"
        if not self._encoder.has_chat_template:
            return prompt, "raw text"
        if self._mode is ChatTemplateMode.never:
            return prompt, "raw text (data.chat_template=always applies the chat template)"
        if self._mode is ChatTemplateMode.auto and any(each in prompt for each in self._markers):
            return prompt, "raw text, which has the chat template's own tokens"
        return [{"role": "user", "content": prompt}], (
            "text, as user messages in the chat template (data.chat_template=never turns that off)"
        )

    @cached_property
    def _markers(self) -> tuple[str, ...]:
        return self._encoder.chat_markers()


def _check_fits(engine: Engine, token_ids: list[int], params: SamplingParams) -> bool:
    """Whether ``max_new_tokens`` fit the context. Raises OutOfMemoryError beyond the KV slots."""
    prompt_len = engine.check(token_ids, params)
    wanted = prompt_len + params.max_new_tokens
    needed = min(wanted, engine.max_context_len)
    slots = engine.max_sequence_len
    if needed > slots:  # submitting would cut the rollout, and output must not depend on memory
        raise OutOfMemoryError(
            f"prompt of {prompt_len} tokens, with what may be generated, needs {needed} KV "
            f"slots and there are {slots}: raise memory.kv_bytes or memory.max_kv_tokens, or lower "
            "sampling.max_new_tokens"
        )
    return wanted <= engine.max_context_len
