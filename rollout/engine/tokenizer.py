"""Prompts in, token ids out; token ids in, text out."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.chat_template import ChatTemplate
from rollout.engine.min_token_count import MinTokenCount
from rollout.errors import InvalidInputError, PromptTooLongError
from rollout.types import Prompt

_BYTES = (bytes, bytearray, memoryview)  # sequences of integers to Python
_PROMPT = "must be text, chat messages or a sequence of integers"


class PromptEncoder:
    """Text, chat messages or token ids to checked token ids.

    ``tokenizer`` is a transformers tokenizer, or None where the model folder has none: then only
    token ids can be prompts and rollouts carry no text.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size

    @classmethod
    def from_pretrained(cls, folder: str | Path, vocab_size: int) -> PromptEncoder:
        folder = Path(folder)
        if (
            not (folder / "tokenizer.json").exists()
            and not (folder / "tokenizer_config.json").exists()
        ):
            return cls(None, vocab_size)
        from transformers import AutoTokenizer  # slow to import, and not needed without one

        return cls(AutoTokenizer.from_pretrained(folder), vocab_size)

    @cached_property
    def _adds_bos(self) -> bool:
        assert self.tokenizer is not None
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer("")["input_ids"][:1] == [bos]

    @cached_property
    def _backend(self) -> Any | None:
        """The tokenizer below transformers' own, which encodes twice as fast; None: there is none.

        A first use of transformers' drops a truncation that the tokenizer's file asks for.
        """
        assert self.tokenizer is not None
        self.tokenizer("", add_special_tokens=False)
        return self.tokenizer.backend_tokenizer if self.tokenizer.is_fast else None

    @cached_property
    def _text_bound(self) -> MinTokenCount | None:
        return MinTokenCount.of(self.tokenizer)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The tokenizer's chat template, which does not exist without a tokenizer."""
        return ChatTemplate(self.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template.exists

    def chat_markers(self) -> tuple[str, ...]:
        """Special tokens that the chat template writes around a user's message.

        Text that has one of them was put through the template already.
        """
        return self.chat_template.markers() if self.has_chat_template else ()

    def encode(
        self,
        prompt: Prompt,
        field: str = "prompt",
        *,
        max_tokens: int | None = None,
        may_be_empty: bool = False,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a prompt: text, chat messages, or token ids in a sequence of Python's or
        numpy's integers, an array or a tensor of one dimension. Raises InvalidInputError naming
        ``field``.

        The tokenizer's special tokens are added to text, but no BOS to text that begins with it.

        Args:
            max_tokens: a text that is sure to have more is refused before the work of encoding it,
                naming ``len(prompt)``; a shorter one may have more all the same.
            add_special_tokens: False: text is encoded as it stands.
        """
        if isinstance(prompt, _BYTES) or not (
            isinstance(prompt, Sequence) or getattr(prompt, "ndim", None) == 1
        ):
            hint = ": the value of prompt_token_ids or of prompt alone, without the dict"
            is_vllms = isinstance(prompt, Mapping)
            raise InvalidInputError(field, prompt, _PROMPT + hint * is_vllms)
        if not len(prompt) and may_be_empty:
            return []
        if not len(prompt):
            raise InvalidInputError(field, prompt, "is empty; give at least one token")
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, field, max_tokens, add_special_tokens)
        elif isinstance(prompt[0], dict):
            return self.encode_rendered(
                self.render_chat(prompt, field), field, max_tokens=max_tokens
            )
        else:
            ids = _integers(prompt, field)
        return self._checked(ids, prompt, field)

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int] | InvalidInputError]:
        """What `encode` returns or raises for each of many prompts: their texts are encoded by one
        call of the tokenizer, on all cores, which lets other threads run."""
        found: list[list[int] | InvalidInputError] = [[] for _ in prompts]
        texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by add_special_tokens
        for number, prompt in enumerate(prompts):
            is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
            try:
                if not is_chat and not (isinstance(prompt, str) and prompt):
                    found[number] = self.encode(prompt)
                    continue
                text = self.render_chat(prompt, "prompt") if is_chat else str(prompt)
                self._need_tokenizer("prompt", prompt)
                _require_encodable(text, "prompt")
                texts[not is_chat][number] = text
            except InvalidInputError as error:
                found[number] = error
        for add_special_tokens, numbered in texts.items():
            encoded = self._encode_texts([*numbered.values()], add_special_tokens)
            for number, ids in zip(numbered, encoded, strict=True):
                try:
                    found[number] = self._checked(ids, prompts[number], "prompt")
                except InvalidInputError as error:
                    found[number] = error
        return found

    def render_chat(self, messages: Any, field: str = "messages", **options: Any) -> str:
        """The text of a prompt for a list of messages; ``options``: those of `ChatTemplate.render`.

        Raises InvalidInputError naming ``field``.
        """
        self._need_tokenizer(field, messages)
        return self.chat_template.render(messages, field, **options)

    def encode_rendered(
        self,
        rendered: str,
        field: str = "messages",
        *,
        max_tokens: int | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of what the chat template made, which brings its own special tokens.

        ``add_special_tokens``: the tokenizer adds those it did not bring. Raises InvalidInputError
        naming ``field``.
        """
        ids = self._encode_text(rendered, field, max_tokens, add_special_tokens)
        return self._checked(ids, rendered, field)

    def prepare_for_threads(self, field: str, value: object) -> None:
        """Raise InvalidInputError naming ``field`` and ``value`` if text cannot be encoded.

        From now on `encode_document` may run beside other uses of the tokenizer: the first use
        drops a truncation that the tokenizer's file asks for, and no later one changes anything.
        """
        self._need_tokenizer(field, value)("", add_special_tokens=False)

    def encode_document(self, document: str | Sequence[int], field: str) -> NDArray[np.int32]:
        """Token ids ``(n,)`` of running text, no special tokens added, or checked token ids.

        Raises InvalidInputError naming ``field``.
        """
        ids: Any = document
        if isinstance(document, str):
            _require_encodable(document, field)
            tokenizer = self._need_tokenizer(field, document)
            ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        array = _integer_array(ids, field)
        outside = array[(array < 0) | (array >= self._vocab_size)]
        if len(outside):
            raise InvalidInputError(
                field,
                int(outside[0]),
                f"token ids must be in [0, {self._vocab_size}), the vocabulary",
            )
        return array.astype(np.int32)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a part of a text, no special tokens added."""
        assert self.tokenizer is not None
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        if self.tokenizer is None:
            raise InvalidInputError("tokenizer", None, "the model folder has none; text needs one")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def decode_with_specials(self, token_ids: Sequence[int]) -> str:
        """Special tokens spelled out, as stop strings may name them."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _encode_text(
        self, text: str, field: str, max_tokens: int | None, add_special_tokens: bool
    ) -> list[int]:
        self._need_tokenizer(field, text)
        self._check_text(text, field, max_tokens)
        return self._encode_texts([text], add_special_tokens)[0]

    def _encode_texts(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        tokenizer = self.tokenizer
        assert tokenizer is not None
        found: list[list[int]]
        if self._backend is None:
            found = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
        else:
            encoded = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            found = [each.ids for each in encoded]
        if add_special_tokens and self._adds_bos:
            for text, ids in zip(texts, found, strict=True):
                if text.startswith(tokenizer.bos_token):
                    del ids[0]  # text of a chat template begins with its own
        return found

    def _check_text(self, text: str, field: str, max_tokens: int | None) -> None:
        _require_encodable(text, field)
        if max_tokens is None or self._text_bound is None or len(text) <= max_tokens:
            return
        least = self._text_bound.min_tokens(text)
        if least > max_tokens:
            raise PromptTooLongError.of_length(f"{least} or more", max_tokens)

    def _checked(self, ids: list[int], prompt: Prompt, field: str) -> list[int]:
        if not ids:
            raise InvalidInputError(field, prompt, "is empty; give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidInputError(
                field, wrong, f"token ids must be in [0, {self._vocab_size}), the vocabulary"
            )
        return ids

    def _need_tokenizer(self, field: str, prompt: object) -> Any:
        if self.tokenizer is None:
            raise InvalidInputError(
                field,
                prompt,
                "the model folder has no tokenizer; give token ids or model.tokenizer",
            )
        return self.tokenizer


def _require_encodable(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            field, text, "holds half of a surrogate pair, which is no text"
        ) from None


def _integers(prompt: Any, field: str) -> list[int]:
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    kinds = set(map(type, tokens))
    if kinds <= {int}:
        return list(tokens)
    try:
        if kinds & {bool, np.bool_}:  # integers to Python
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise InvalidInputError(field, prompt, _PROMPT) from None


def _integer_array(tokens: Any, field: str) -> NDArray[np.integer]:
    remedy = "must be a flat sequence of integers"
    try:
        array = np.asarray(tokens if len(tokens) else np.empty(0, dtype=np.int32))
    except (TypeError, ValueError):  # no length, or sequences of different lengths
        raise InvalidInputError(field, tokens, remedy) from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(field, tokens, remedy)
    return array


def prompt_group(prompt_ids: Sequence[int]) -> int:
    data = np.asarray(prompt_ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
