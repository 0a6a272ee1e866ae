"""The fingerprint of what decides an output's content, so that a job goes on only with what it
began itself.

Speculation, memory and scheduling are absent: they cannot be seen in the rollouts.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rollout.models.checkpoint import Checkpoint
from rollout.models.loader import resolve_device, resolve_dtype
from rollout.models.spec import ModelSpec
from rollout.offline.config import RunConfig
from rollout.ops import gpu
from rollout.scheduler.step_limits import StepLimits

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def fingerprint(config: RunConfig, prompts: str) -> dict[str, Any]:
    """Field -> value or hash, as JSON gives it back. ``prompts`` is the hash of their file."""
    model = Path(config.model.path)
    tokenizer = Path(config.model.tokenizer or config.model.path)
    device = resolve_device(config.model.device)
    spec = ModelSpec.read(model)
    stored = spec.dtype or Checkpoint(model).dtype
    fields: dict[str, Any] = {
        "model": _files_hash(model, ("config.json", "generation_config.json")),
        "model weights": _weights_hash(model),
        "model tokenizer": _files_hash(tokenizer, _TOKENIZER_FILES),
        "specrollout": version("specrollout"),
        "model.dtype": str(resolve_dtype(config.model.dtype, stored, device)),
        "model.device": device.type,
        "model.max_context_len": config.model.max_context_len,
        "exact": config.exact,
        "data (the prompts themselves)": prompts,
        "data.prompt_column": config.data.prompt_column,
        "data.columns": config.data.columns,
        "data.chat_template": config.data.chat_template.value,
        "data.limit": config.data.limit,
        "output.prompt_ids": config.output.prompt_ids,
        "output.stats": config.output.stats,
    }
    if not config.exact:  # then these may be seen in the output
        if config.parallel.size > 1:
            fields["parallel"] = {"mode": config.parallel.mode.value, "size": config.parallel.size}
        limits = StepLimits.of(
            config.scheduler,
            gpu.total_bytes(device),
            recurrent=spec.linear_attention is not None,
        )
        scheduler = asdict(config.scheduler) | asdict(limits)
        fields |= {"spec": config.spec, "scheduler": scheduler}
    fields |= {f"sampling.{name}": value for name, value in asdict(config.sampling).items()}
    return json.loads(json.dumps(fields))


def differences(there: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    return [_difference(name, there.get(name), now.get(name)) for name in names]


def _difference(name: str, there: Any, now: Any) -> str:
    if isinstance(now, str) and (" " in name or name == "model"):  # hashes say nothing to a reader
        return f"{name} differs"
    shown = name if name.isprintable() else repr(name)  # the record is untrusted text
    return f"{shown} was {there!r} and is {now!r}"


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_hash(folder: Path, names: tuple[str, ...]) -> str:
    found = {name: _hash_file(folder / name) for name in names if (folder / name).is_file()}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _weights_hash(folder: Path) -> str:
    """Hash of names, sizes and samples: reading whole checkpoints would take as long as loading."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
