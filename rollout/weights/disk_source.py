"""An update from a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import InvalidInputError
from rollout.models.pulled_folder import pulls_held_off
from rollout.validation import checked_path
from rollout.weights.adapter_folder import AdapterFolder, is_adapter_folder
from rollout.weights.parts import WeightParts
from rollout.weights.source import WeightSource, WeightTensors
from rollout.weights.update_options import UpdateOptions


@dataclass(frozen=True, slots=True)
class DiskSource(WeightSource):
    """A safetensors folder, sharded or not, or a LoRA adapter that PEFT has saved.

    With a selector of drafts alone it is a draft's folder, in any layout that one can be loaded
    from.
    """

    model_path: str | Path

    @contextmanager
    def opened(self, parts: WeightParts, options: UpdateOptions) -> Iterator[WeightTensors]:
        """The folder's tensors. An adapter is an update with a ``lora_scaling`` of its own.

        Raises CheckpointError for a missing, truncated or damaged file, for the folder of another
        draft, and while a pull into the folder is under way.
        """
        folder = Path(checked_path(self.model_path, "model_path"))
        with pulls_held_off(folder):
            if is_adapter_folder(folder):
                yield _adapter(folder, parts, options)
            else:
                yield parts.source(folder, options.selector)


def _adapter(folder: Path, parts: WeightParts, options: UpdateOptions) -> AdapterFolder:
    """Raises InvalidInputError for an adapter that does not go with the options, or breaks ties."""
    adapter = AdapterFolder(folder)
    if not adapter.keeps_ties and (tied := parts.tied(adapter.whole)):
        raise InvalidInputError(
            "model_path", str(folder),
            f"replaces {', '.join(tied)}, which the model ties to another tensor: train "
            "with ensure_weight_tying=True, or send merged weights",
        )  # fmt: skip
    if options.lora_scaling not in (None, adapter.scaling):
        raise InvalidInputError(
            "lora_scaling", options.lora_scaling, f"is {adapter.scaling} in {folder}"
        )
    return adapter
