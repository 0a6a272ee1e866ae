"""The prompts' token ids, a block at a time: text by the chat template or as it stands."""

from __future__ import annotations

import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from rollout.engine.protocol import Engine
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.offline.config import ChatTemplateMode, RunConfig
from rollout.offline.prompt_check import CheckedPrompts, handle_broken
from rollout.offline.prompts import BrokenRow, PromptRow
from rollout.types import Prompt, SamplingParams

log = logging.getLogger(__name__)

_BLOCK = 4096  # rows that are encoded together
_FIRST = 16_384  # rows that are checked before anything is generated
_AHEAD = 2  # blocks that are encoded meanwhile


class TokenizedRow(NamedTuple):
    """A row and its token ids, which are what runs."""

    row: PromptRow
    token_ids: array[int]


class TokenizedPrompts:
    """The rows of prompts with their token ids, encoded on a thread ahead of who reads them.

    Checks what takes a tokenizer and the sizes of model and memory: of the first 16,384 rows when
    it is made, of later ones when they are read. Raises as `check_rows` does.
    """

    def __init__(self, checked: CheckedPrompts, engine: Engine, config: RunConfig) -> None:
        """Logs how the first prompts were encoded."""
        self._checked = checked
        self._engine = engine
        self._config = config
        self._encoder = RowEncoder(engine.encoder, config.data.chat_template)
        self._longest_fitting = 0  # tokens that leave room for all that may be generated
        self._is_cut = False  # whether some prompt leaves less
        self._rows = checked.rows()
        encoded: Counter[str] = Counter()  # what was done -> prompts
        self._first = self._usable(self._encoded(_FIRST), encoded)
        shown = [f"{count} of {done}" for done, count in encoded.items()]
        log.info("prompts: %s", "; ".join(shown) if len(shown) > 1 else next(iter(encoded)))

    def rows(
        self, is_done: Callable[[PromptRow], bool] = lambda row: False
    ) -> Iterator[TokenizedRow]:
        """The good rows, in file order, but for those that are done; once."""
        yield from (each for each in self._first if not is_done(each.row))
        self._first = []
        self._rows = (row for row in self._rows if not is_done(row))
        with ThreadPoolExecutor(1, "prompt tokens") as thread:
            blocks = deque(thread.submit(self._encoded, _BLOCK) for _ in range(_AHEAD))
            while block := blocks.popleft().result():
                blocks.append(thread.submit(self._encoded, _BLOCK))
                yield from self._usable(block, Counter())

    def _encoded(self, most: int) -> list[_Encoded]:
        """The next rows, and how each was encoded or why it cannot be."""
        rows = [*islice(self._rows, most)]
        encoded = self._encoder.encode_all([row.prompt for row in rows])
        return [_Encoded(row, *each) for row, each in zip(rows, encoded, strict=True)]

    def _usable(self, block: list[_Encoded], encoded: Counter[str]) -> list[TokenizedRow]:
        """The rows that can run. Raises for others, or has them skipped."""
        usable, broken, num_cut = [], [], 0
        for row, ids, done in block:
            try:
                if isinstance(ids, InvalidInputError):
                    raise ids
                num_cut += not self._fits(ids)
            except OutOfMemoryError as error:
                # Never skipped: the output must not depend on how much memory was free.
                raise OutOfMemoryError(f"{row.where}: {error}") from error
            except InvalidInputError as error:
                if error.field.startswith("sampling."):
                    raise
                broken.append(BrokenRow(row.index, row.where, str(error)))
            else:
                usable.append(TokenizedRow(row, array("i", ids)))
                encoded[done] += 1
        handle_broken(broken, self._checked, self._config.data.on_error)
        if num_cut and not self._is_cut:
            self._is_cut = True
            self._warn_of_cut(num_cut, len(block))
        return usable

    def _fits(self, ids: list[int]) -> bool:
        """Whether all that may be generated fits behind these tokens; asked of the longest yet."""
        if len(ids) <= self._longest_fitting:
            return True
        fits = _check_fits(self._engine, ids, self._config.sampling)
        if fits:
            self._longest_fitting = len(ids)
        return fits

    def _warn_of_cut(self, num_cut: int, num_rows: int) -> None:
        limit = (
            "model.max_context_len" if self._config.model.max_context_len else "the model's limit"
        )
        log.warning(
            "%d of %d prompts leave room for fewer than sampling.max_new_tokens=%d tokens in the "
            "context of %d (%s): their rollouts end where it is full",
            num_cut, num_rows, self._config.sampling.max_new_tokens, self._engine.max_context_len,
            limit,
        )  # fmt: skip


class _Encoded(NamedTuple):
    row: PromptRow
    token_ids: list[int] | InvalidInputError
    done: str


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

    def encode_all(
        self, prompts: Sequence[Prompt]
    ) -> list[tuple[list[int] | InvalidInputError, str]]:
        """Token ids, or why there are none, and what was done, for the user."""
        as_encoded = [self._as_encoded(prompt) for prompt in prompts]
        ids = self._encoder.encode_all([prompt for prompt, _ in as_encoded])
        return list(zip(ids, (done for _, done in as_encoded), strict=True))

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
