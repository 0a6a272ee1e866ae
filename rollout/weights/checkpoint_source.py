"""Weights from a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import torch

from rollout.models.checkpoint import Checkpoint
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import WeightTensors


class CheckpointSource(WeightTensors):
    """A folder with model.safetensors, or with shards and their index.

    Opening reads every header: a missing or truncated shard raises CheckpointError here, and wrong
    names and shapes are in the manifest. Tensors are views of the mapped files.
    """

    is_stored = True

    def __init__(self, model_path: str | Path) -> None:
        self._checkpoint = Checkpoint(Path(model_path))
        self._names: Mapping[str, str] = {name: name for name in self._checkpoint.tensors}

    @classmethod
    def named(cls, checkpoint: Checkpoint, names: Mapping[str, str]) -> Self:
        """Some tensors of a folder: their names there, and those they come under."""
        source = cls.__new__(cls)
        source._checkpoint, source._names = checkpoint, names
        return source

    def manifest(self) -> Manifest:
        stored = self._checkpoint.tensors
        return {
            ours: TensorSpec(stored[name].shape, stored[name].dtype)
            for name, ours in self._names.items()
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._checkpoint:
            if name in self._names:
                yield self._names[name], tensor
