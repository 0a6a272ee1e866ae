"""Repositories of the Hugging Face hub, by the names that people give instead of a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rollout.errors import InvalidInputError

MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Endings of the files that models and tokenizers are read from."""

_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")


def hub_repository(path: str) -> tuple[str, str | None] | None:
    """``ORG/NAME`` and the revision of ``ORG/NAME[@REVISION]``; None for any other path, and for a
    folder of that name."""
    named = _REPOSITORY.fullmatch(path)
    return None if named is None or os.path.isdir(path) else (named[1], named[2])


def model_folder(path: str, field: str, *, weights: bool = True) -> str:
    """The folder of a model, a draft or a tokenizer.

    That is the snapshot in huggingface_hub's cache where ``path`` names a repository of the hub:
    what is missing there is downloaded, once for all processes that ask at the same time. Any other
    path is returned as it is. HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the other
    variables of huggingface_hub count.

    Args:
        weights: False leaves the safetensors out.

    Raises InvalidInputError naming ``field`` for a repository that cannot be had.
    """
    if (named := hub_repository(path)) is None:
        return path
    from huggingface_hub import snapshot_download  # slow to import, and not needed for a folder
    from huggingface_hub.errors import HTTPError

    # Other formats and copies of the weights lie in folders, or are named so by Mistral.
    unread = ["*/*", "consolidated*"] + ([] if weights else ["*.safetensors"])
    try:
        return snapshot_download(
            named[0],
            revision=named[1],
            allow_patterns=[f"*{suffix}" for suffix in MODEL_SUFFIXES],
            ignore_patterns=unread,
        )
    except (HTTPError, OSError, ValueError) as error:
        raise InvalidInputError(
            field, path,
            "is no folder, and cannot be had from the hub: give a folder, or ORG/NAME[@REVISION] "
            "of a model that the hub or its cache has. "
            + " ".join(str(error).split()),
        ) from None  # fmt: skip


def hub_name(folder: str) -> str | None:
    """``ORG/NAME@COMMIT`` of a snapshot in huggingface_hub's cache; None for any other folder."""
    storage, snapshots, commit = ("", "", "", *Path(folder).absolute().parts)[-3:]
    kind, *name = storage.split("--")
    if (kind, snapshots, len(name)) != ("models", "snapshots", 2):
        return None
    return f"{'/'.join(name)}@{commit}"
