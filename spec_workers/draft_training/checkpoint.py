"""Folders that hold a trained draft: config.json and model.safetensors, read by the engine.

EAGLE-3 is laid out as its authors do, an MTP chain as `SpecrolloutMTP`, whose tensors carry the
names an engine knows them by.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollout.engine.durable import replace_durably
from spec_workers.draft_training.draft import TrainableDraft

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def save_draft(draft: TrainableDraft, folder: Path, dtype: torch.dtype) -> None:
    """Write a draft; whoever reads the folder meanwhile finds the old one or the new."""
    tensors = {
        draft.stored_prefix + name: parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in draft.named_parameters()
    }
    tensors |= {name: table.cpu() for name, table in draft.tables().items()}
    config = draft.config() | {"dtype": str(dtype).removeprefix("torch."), "torch_dtype": None}
    config = {name: value for name, value in config.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))
    _replace(folder / WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """A file is there whole or, if anything fails, as it was."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        write(scratch)
        replace_durably(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
