"""Reads what ``data.path`` names: JSON lines, or Parquet."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError
from rollout.hub import hub_repository
from rollout.offline.config import DataConfig, is_prompt_file

_BYTE_ORDER_MARK_AND_SPACES = b"\xef\xbb\xbf \t\r\n"


def read_source(config: DataConfig) -> tuple[bytes, bool]:
    """The prompts, and whether they are Parquet; else they are JSON lines.

    Files keep their format, but each item of a JSON list becomes a line. Datasets become Parquet.
    Raises InvalidInputError for what cannot be read.
    """
    if not config.path:
        raise _unreadable(config, "must name a file or a dataset")
    if not is_prompt_file(config.path):
        dataset = _load_dataset(config)
        if not len(dataset):
            raise _unreadable(config, "has no rows")
        parquet = io.BytesIO()
        dataset.to_parquet(parquet)
        return parquet.getvalue(), True
    _refuse_split(config)
    path = Path(config.path)
    if not path.is_file():
        raise _unreadable(config, "there is no such file")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _unreadable(config, f"cannot be read as gzip: {error}") from None
    except OSError as error:
        raise _unreadable(config, f"cannot be read: {error.strerror}") from None
    start = content[:4096].lstrip(_BYTE_ORDER_MARK_AND_SPACES)
    if ".json" in path.suffixes and start.startswith(b"["):
        content = _as_lines(config, content)
    return content, path.suffix == ".parquet"


def _as_lines(config: DataConfig, content: bytes) -> bytes:
    try:
        items = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _unreadable(config, f"cannot be read as JSON: {error}") from None
    return b"\n".join(json.dumps(item).encode() for item in items)


def _load_dataset(config: DataConfig) -> Any:
    try:
        from datasets import load_dataset, load_from_disk
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise _unreadable(
            config, "is no file, and datasets need a package: pip install 'specrollout[data]'"
        ) from None
    path, revision = hub_repository(config.path) or (os.path.abspath(config.path), None)
    try:
        if os.path.isfile(os.path.join(path, "state.json")):  # what Dataset.save_to_disk wrote
            _refuse_split(config)
            return load_from_disk(path)
        return load_dataset(path, config.name, split=config.split or "train", revision=revision)
    except InvalidInputError:
        raise
    except (DatasetsError, OSError, ValueError, EOFError) as error:
        raise _unreadable(
            config, f"is no file, and cannot be loaded as a dataset: {error}"
        ) from None


def _refuse_split(config: DataConfig) -> None:
    for name in ("name", "split"):
        if (value := getattr(config, name)) is not None:
            remedy = f"{config.path} has no such parts: leave it out"
            raise InvalidInputError(f"data.{name}", value, remedy)


def _unreadable(config: DataConfig, reason: str) -> InvalidInputError:
    return InvalidInputError("data.path", config.path, reason)
