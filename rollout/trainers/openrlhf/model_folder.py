"""Where a model's files are."""

from __future__ import annotations

from pathlib import Path


def model_folder(name_or_path: str) -> str:
    """A folder as it is; for a name on the hub the folder of its files, fetched where needed."""
    if Path(name_or_path).is_dir():
        return name_or_path
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    return snapshot_download(name_or_path, allow_patterns=wanted)
