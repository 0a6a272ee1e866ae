"""Weights published in a folder as the trainers of slime and SkyRL publish them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
import zstandard
from blake3 import blake3
from safetensors.numpy import save_file

CHECKSUMS = {
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": lambda data: blake3(data).hexdigest(),
}


def publish(
    folder: Path,
    version: int,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    layout: str = "slime",
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write the difference between two versions; the file of the tensors that changed."""
    changed: dict[str, np.ndarray] = {}
    checksums: dict[str, str] = {}
    for name, tensor in new.items():
        before, after = _bytes(old[name]), _bytes(tensor)
        if np.array_equal(before, after):
            continue
        if encoding == "xor":
            difference = before ^ after
        else:
            places = np.flatnonzero(before != after).astype("<u4")
            parts = [np.array([places.size], "<u4"), places]
            difference = np.concatenate([*(p.view(np.uint8) for p in parts), after[places]])
        frame = zstandard.ZstdCompressor(level=1).compress(difference.tobytes())
        changed[name] = np.frombuffer(frame, np.uint8)
        checksums[name] = CHECKSUMS[checksum](after.tobytes())
    into = folder / (f"delta-{version:08d}" if layout == "skyrl" else f"weight_v{version:06d}")
    into.mkdir(parents=True)
    file = into / "model-00000-of-00001.safetensors"
    if layout == "skyrl":
        save_file(changed, file)
        tensors = [
            {
                "name": name, "payload_file": file.name, "payload_key": name,
                "checksum": checksums[name], "checksum_algorithm": checksum,
            }
            for name in changed
        ]  # fmt: skip
        manifest = {"version": version, "base_version": version - 1, "tensors": tensors}
        (into / "manifest.json").write_text(json.dumps(manifest | dict(metadata or {})))
        return file
    save_file(changed, file, metadata=checksums)
    index = {
        "metadata": {
            "version": f"{version:06d}", "base_version": f"{version - 1:06d}",
            "delta_encoding": encoding, "compression_format": "zstd", "checksum_format": checksum,
        } | dict(metadata or {}),
        "weight_map": dict.fromkeys(changed, file.name),
    }  # fmt: skip
    (into / "model.safetensors.index.json").write_text(json.dumps(index))
    return file


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
