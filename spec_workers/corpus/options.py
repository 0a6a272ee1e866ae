"""The options of an n-gram corpus."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.engine.draft_corpus import check_name
from rollout.errors import InvalidInputError
from rollout.validation import checked_int, checked_path


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """The bounds of an n-gram corpus, and its initial content.

    Args:
        corpus_bytes: bound on the corpus of rollouts and its index.
        corpus_path: what an earlier run saved, to begin with; default: an empty corpus.
        external_corpora: name -> JSONL file, per line a JSON string or an object with ``text``.
            Loaded in the background from the first step on; one that ``corpus_path`` holds
            under such a name makes way.
        max_external_bytes: bound on all external corpora together, loading ones included.
        max_external_tokens: bound on the tokens of all external corpora together.

    Raises InvalidInputError, naming the option.
    """

    corpus_bytes: int = 256 << 20
    corpus_path: str | None = None
    external_corpora: Mapping[str, str] | None = None
    max_external_bytes: int = 1 << 30
    max_external_tokens: int = 1 << 24

    def __post_init__(self) -> None:
        for option in ("corpus_bytes", "max_external_bytes", "max_external_tokens"):
            checked_int(getattr(self, option), f"spec.{option}", minimum=1)
        if self.corpus_path is not None:
            checked_path(self.corpus_path, "spec.corpus_path")
        field, files = "spec.external_corpora", self.external_corpora
        if not isinstance(files, Mapping | None):
            raise InvalidInputError(field, files, "must map names to JSONL files")
        for name, path in (files or {}).items():
            check_name(field, str(name))
            if not isinstance(path, str | os.PathLike):
                remedy = "must be the path of a JSONL file"
                raise InvalidInputError(f"{field}.{name}", path, remedy)

    @property
    def external_files(self) -> dict[str, str]:
        """The JSONL file of each external corpus by its name."""
        files = self.external_corpora or {}
        return {str(name): os.fspath(path) for name, path in files.items()}

    def check_corpus_files(self) -> None:
        """Raise InvalidInputError for a file that is not on this machine."""
        files = {f"external_corpora.{name}": path for name, path in self.external_files.items()}
        if self.corpus_path is not None:
            files["corpus_path"] = os.fspath(self.corpus_path)
        for option, path in files.items():
            if not Path(path).is_file():
                field = f"spec.{option}"
                raise InvalidInputError(field, path, "there is no such file")
