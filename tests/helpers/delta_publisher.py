"""Weights published in a folder as SkyRL's trainer publishes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard
from safetensors.numpy import save_file


def publish(
    folder: Path,
    version: int,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    fields: Mapping[str, object] | None = None,
) -> Path:
    """Write the difference between two versions; the file of the tensors that changed.

    ``fields``: of the manifest, in place of what belongs there.
    """
    changed: dict[str, np.ndarray] = {}
    tensors: list[dict[str, object]] = []
    into = folder / f"delta-{version:08d}"
    into.mkdir(parents=True)
    file = into / "model-00000-of-00001.safetensors"
    for name, tensor in new.items():
        before, after = _bytes(old[name]), _bytes(tensor)
        if np.array_equal(before, after):
            continue
        frame = zstandard.ZstdCompressor(level=1).compress((before ^ after).tobytes())
        changed[name] = np.frombuffer(frame, np.uint8)
        tensors.append({
            "name": name, "payload_file": file.name, "payload_key": name,
            "checksum": xxhash.xxh3_128_hexdigest(after.tobytes()),
            "checksum_algorithm": "xxh3-128",
        })  # fmt: skip
    save_file(changed, file)
    manifest = {"version": version, "base_version": version - 1, "tensors": tensors}
    (into / "manifest.json").write_text(json.dumps(manifest | dict(fields or {})))
    return file


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
