"""The engine's settings, from the command lines of OpenRLHF and of this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.engine.engine import RolloutEngine
from rollout.trainers.openrlhf.options import OwnOptions


def model_folder(name_or_path: str) -> str:
    """A folder as it is; for a name on the hub the folder of its files, fetched where needed."""
    if Path(name_or_path).is_dir():
        return name_or_path
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    return snapshot_download(name_or_path, allow_patterns=wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """The settings of an actor's engine, sent to it by Ray."""

    model: str  # a folder, or a name on the hub
    seed: int
    resumed_from: str  # the tag of the checkpoint that the run goes on from, or ""
    max_context_len: int
    prefix_cache: bool
    kv_fraction: float  # of the memory free once the model is read; an override goes before it
    dtype: str  # the trainer's parameters'; an override of the options goes before it
    options: OwnOptions

    def make_engine(self) -> RolloutEngine:
        options = self.options
        given = {
            "max_context_len": self.max_context_len,
            "prefix_cache": self.prefix_cache,
            "kv_fraction": self.kv_fraction,
            "dtype": self.dtype,
        }
        return RolloutEngine.from_pretrained(
            model_folder(self.model),
            options.spec,
            spec_options=options.spec_options,
            **given | options.overrides,
        )
