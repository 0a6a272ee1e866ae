"""Copies what ``data.path`` names to a file of JSON lines or to a Parquet file."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import IO, Any

from rollout.errors import InvalidInputError
from rollout.hub import hub_repository
from rollout.offline.config import DataConfig, is_prompt_file

_CHUNK_BYTES = 1 << 20
_BYTE_ORDER_MARK_AND_SPACES = b"\xef\xbb\xbf \t\r\n"


def copy_prompts(config: DataConfig, copy: IO[bytes]) -> bool:
    """Write the prompts to ``copy``, and say whether it is Parquet.

    Files keep their format, but a list of JSON becomes a line for each item. Datasets become
    Parquet. Raises InvalidInputError for what cannot be read, and OSError where ``copy`` is full.
    """
    if not config.path:
        raise _unreadable(config, "must name a file or a dataset")
    if not is_prompt_file(config.path):
        dataset = _load_dataset(config)
        if not len(dataset):
            raise _unreadable(config, "has no rows")
        dataset.to_parquet(copy)
        return True
    _refuse_split(config)
    path = Path(config.path)
    if not path.is_file():
        raise _unreadable(config, "there is no such file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(config, f"cannot be read: {error.strerror}") from None
    with file:
        original = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        try:
            start = original.peek(_CHUNK_BYTES).lstrip(_BYTE_ORDER_MARK_AND_SPACES)
            if ".json" in path.suffixes and start.startswith(b"["):
                _copy_items(config, original.read(), copy)
            else:
                shutil.copyfileobj(original, copy, _CHUNK_BYTES)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise _unreadable(config, f"cannot be read as gzip: {error}") from None
    return path.suffix == ".parquet"


def _copy_items(config: DataConfig, content: bytes, copy: IO[bytes]) -> None:
    """Write the items of a JSON list as lines."""
    try:
        items = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _unreadable(config, f"cannot be read as JSON: {error}") from None
    for item in items:
        copy.write(json.dumps(item).encode() + b"\n")


def _load_dataset(config: DataConfig) -> Any:
    """The ``datasets.Dataset`` in a folder or on the hub. Raises InvalidInputError."""
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
