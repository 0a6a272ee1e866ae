"""Weights from a safetensors folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from rollout.models.checkpoint import Checkpoint
from rollout.weights.manifest import Manifest, TensorSpec


class CheckpointSource:
    """A folder with model.safetensors, or with shards and their index, as a WeightSource.

    Opening reads every header: a missing or truncated shard raises CheckpointError here, and wrong
    names and shapes are in the manifest. Tensors are views of the mapped files.
    """

    def __init__(self, model_path: str | Path) -> None:
        self._checkpoint = Checkpoint(Path(model_path))

    def manifest(self) -> Manifest:
        return {
            name: TensorSpec(stored.shape, stored.dtype)
            for name, stored in self._checkpoint.tensors.items()
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._checkpoint)
