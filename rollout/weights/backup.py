"""The values of weights, set aside while their memory is given back."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rollout.models.layers.weight_loader import WeightLoader
from rollout.weights.parts import WeightParts

_FILE_BYTES = 256 << 20
"""The most bytes of one file, and so of the copy that is in memory while it is written."""


class WeightBackup:
    """A bitwise copy of every tensor that some parts own, outside the memory they give back.

    What is on a device goes to host memory. What is in host memory goes to safetensors files, in a
    folder of the system's temporary one (``TMPDIR``; on a tmpfs that would be memory still), which
    is removed by ``discard``, and at exit.
    """

    def __init__(self, parts: WeightParts, names: frozenset[str]) -> None:
        """Raises OSError or SafetensorError where the folder cannot hold them; none is left."""
        self.names = names
        self._on_host: dict[str, torch.Tensor] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="specrollout-weights-"))
        self._remove = weakref.finalize(self, _remove, self._folder, os.getpid())
        self._files: list[Path] = []
        try:
            self._save(_each_once(parts.weight_loaders(names)))
        except BaseException:
            self.discard()
            raise

    def write_back(self, parts: WeightParts) -> None:
        """Write the copies back to the same parts, whose memory has been allocated again."""
        weight_loaders = _each_once(parts.weight_loaders(self.names))
        for name, values in self._on_host.items():
            weight_loaders[name].write(values)
        for path in self._files:
            for name, values in load_file(path).items():
                weight_loaders[name].write(values)
        for part in sorted(self.names):
            parts[part].finish_loading()

    def discard(self) -> None:
        """Forget the copy and remove the folder."""
        self._on_host.clear()
        self._files.clear()
        self._remove()

    def _save(self, weight_loaders: Mapping[str, WeightLoader]) -> None:
        filling: dict[str, torch.Tensor] = {}
        num_bytes = 0
        for name, loader in weight_loaders.items():
            values = loader.read()
            if values.device.type != "cpu":
                self._on_host[name] = values.cpu()
                continue
            if filling and num_bytes + values.nbytes > _FILE_BYTES:
                self._write_file(filling)
                filling, num_bytes = {}, 0
            filling[name] = values
            num_bytes += values.nbytes
        if filling:
            self._write_file(filling)

    def _write_file(self, tensors: dict[str, torch.Tensor]) -> None:
        path = self._folder / f"{len(self._files)}.safetensors"
        save_file(tensors, path)
        self._files.append(path)


def _remove(folder: Path, owner: int) -> None:
    """Remove the folder, unless this is a fork of its owner, which runs the owner's finalizers
    too."""
    if os.getpid() == owner:
        with suppress(FileNotFoundError):  # somebody has cleaned up before
            shutil.rmtree(folder)


def _each_once(weight_loaders: Mapping[str, WeightLoader]) -> dict[str, WeightLoader]:
    """One loader of each tensor, although tied names and borrowing parts have several."""
    return {name: each for name, each in weight_loaders.items() if each.required}
