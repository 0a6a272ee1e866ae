"""The documents of an external corpus: texts, token ids or a JSONL file, as arrays of token ids."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import InvalidInputError
from rollout.validation import checked_path

_BATCH_TOKENS = 1 << 16
_MAX_LINE_BYTES = 64 << 20  # a document is held whole, several times while it is encoded
_LINE = 'must be a JSON string or an object with a text under "text"'


class CorpusDocuments(ABC):
    """One source. Iterated once, on any one thread, it gives batches of int32 arrays ``(n_i,)``.

    A text is encoded as it stands, without special tokens: drafts continue running text. Empty
    documents are passed over. Nothing is held beyond a batch and the document being read.
    Iteration raises InvalidInputError at the first document that cannot be used, naming it, and at
    the end if there was none; OSError for a file that cannot be read.
    """

    def __init__(self, encoder: PromptEncoder, source: str, size: int) -> None:
        self._encoder = encoder
        self._source = source
        self._size = size  # in bytes or documents, and so is:
        self._done = 0

    @abstractmethod
    def _arrays(self) -> Iterator[NDArray[np.int32]]:
        """One document after the other; counts ``_done`` up."""

    def __iter__(self) -> Iterator[list[NDArray[np.int32]]]:
        batch: list[NDArray[np.int32]] = []
        batch_tokens = num_tokens = 0
        for array in self._arrays():
            if not len(array):
                continue
            batch.append(array)
            batch_tokens += len(array)
            num_tokens += len(array)
            if batch_tokens >= _BATCH_TOKENS:
                yield batch
                batch, batch_tokens = [], 0
        if batch:
            yield batch
        if not num_tokens:
            raise InvalidInputError(self._source, "empty", "must hold at least one token")

    def fraction_read(self) -> float:
        return min(1.0, self._done / self._size) if self._size else 1.0


class ListedDocuments(CorpusDocuments):
    """Texts, or token ids, already in memory. They must not be changed until they are read."""

    def __init__(self, encoder: PromptEncoder, values: Sequence[Any], field: str) -> None:
        """``field`` is ``documents`` for texts, else ``token_chunks``. Raises InvalidInputError."""
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise InvalidInputError(field, values, "must be a list of documents")
        super().__init__(encoder, field, len(values))
        self._values = values
        self._holds_text = field == "documents"
        if self._holds_text:
            encoder.prepare_for_threads(field, values)

    def _arrays(self) -> Iterator[NDArray[np.int32]]:
        for index, value in enumerate(self._values):
            field = f"{self._source}[{index}]"
            if isinstance(value, str) != self._holds_text:
                remedy = "must be text" if self._holds_text else "must be a sequence of integers"
                raise InvalidInputError(field, value, remedy)
            self._done += 1
            yield self._encoder.encode_document(value, field)


class FileDocuments(CorpusDocuments):
    """Documents of a JSONL file: each line a JSON string or an object with ``text``. Blank lines
    are none.

    A line may have 64 MiB.
    """

    def __init__(
        self, encoder: PromptEncoder, path: str | os.PathLike[str], field: str = "file_path"
    ) -> None:
        """Raises InvalidInputError naming ``field``."""
        self._path = Path(checked_path(path, field))
        if not self._path.is_file():
            raise InvalidInputError(field, str(path), "there is no such file")
        super().__init__(encoder, str(path), self._path.stat().st_size)
        encoder.prepare_for_threads(field, str(path))

    def _arrays(self) -> Iterator[NDArray[np.int32]]:
        with self._path.open("rb") as file:
            lines = iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                self._done += len(line)
                where = f"{self._path}:{number}"
                if len(line) > _MAX_LINE_BYTES:
                    raise InvalidInputError(
                        where, line[:40], f"is longer than {_MAX_LINE_BYTES} bytes: split the line"
                    )
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if content.strip():
                    yield self._encoder.encode_document(_text_of(content, where), where)


def documents_from(
    encoder: PromptEncoder,
    *,
    documents: Sequence[str] | None = None,
    token_chunks: Sequence[Sequence[int]] | None = None,
    file_path: str | os.PathLike[str] | None = None,
) -> CorpusDocuments:
    """The one source that is given. Raises InvalidInputError."""
    sources = {"documents": documents, "token_chunks": token_chunks, "file_path": file_path}
    given = [field for field, value in sources.items() if value is not None]
    if len(given) != 1:
        raise InvalidInputError(
            "documents, token_chunks, file_path", given, "give exactly one of the three"
        )
    if file_path is not None:
        return FileDocuments(encoder, file_path)
    values = documents if documents is not None else token_chunks
    assert values is not None, "one is given"
    return ListedDocuments(encoder, values, given[0])


def _text_of(line: bytes, where: str) -> str:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        found = line[max(0, error.start - 10) : error.start + 10].strip()
        raise InvalidInputError(where, found, f"is not UTF-8: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        found = line.strip()
        raise InvalidInputError(where, found, f"is not JSON ({error}): {_LINE}") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidInputError(where, value, _LINE)
    return text
