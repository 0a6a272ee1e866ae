"""The calls that bring weights by one transport each, as the engines of this field have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rollout.weights.bucket import FlattenedBucket, tensor_source
from rollout.weights.disk_source import DiskSource
from rollout.weights.distributed import GroupSource
from rollout.weights.shared_memory import HandleSource
from rollout.weights.source import NamedTensors, WeightSource
from rollout.weights.update_counts import UpdateCounts


class UpdateCalls(Protocol):
    def update_weights(self, source: WeightSource, /, **options: Any) -> UpdateCounts | None:
        """Bring weights to every model that ``selector`` names, or to none, between two steps.

        An update names every tensor by its checkpoint name (``partial=True``: some).
        `UpdateOptions` documents ``options``. A call between `begin_weight_update` and
        `end_weight_update` is a part of that update, takes no options and returns None; any other
        is an update of its own, and returns what `end_weight_update` does.

        Raises InvalidInputError, WeightUpdateError, and what the source raises. A failure before
        the first byte leaves the old weights serving; a later one leaves the engine refusing to
        run, saying why, until a full update succeeds.
        """
        ...

    def update_weights_from_tensor(
        self,
        /,
        named_tensors: NamedTensors | Mapping[str, torch.Tensor] | Iterable[FlattenedBucket],
        *,
        load_format: str | None = None,
        **options: Any,
    ) -> UpdateCounts | None:
        """Take weights that are in this process.

        Args:
            named_tensors: pairs of checkpoint name and tensor, or a mapping, on any device, of any
                floating dtype. A collection, and the manifest of a `WeightTensors`, is checked
                through before a byte moves, of a generator each tensor as it comes.
            load_format: ``direct``: nothing is converted; a dtype that is not the model's is
                refused. ``flattened_bucket``: ``named_tensors`` are buckets, as `buckets` makes.
        """
        return self.update_weights(tensor_source(named_tensors, load_format), **options)

    def update_weights_from_disk(
        self, /, model_path: str | Path, **options: Any
    ) -> UpdateCounts | None:
        """Take the weights of a safetensors folder, or a LoRA adapter that PEFT has saved; see
        `DiskSource`."""
        return self.update_weights(DiskSource(model_path), **options)

    def update_weights_from_ipc(
        self, /, handles: Mapping[str, Any] | Iterable[Mapping[str, Any]], **options: Any
    ) -> UpdateCounts | None:
        """Take buckets that another process of this host holds; see `HandleSource`. The sender may
        fill their memory anew when this returns."""
        return self.update_weights(HandleSource(handles), **options)

    def update_weights_from_distributed(
        self,
        /,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        *,
        load_format: str | None = None,
        **options: Any,
    ) -> UpdateCounts | None:
        """Take the tensors that the group's rank 0 sends meanwhile; see `GroupSource`.

        Raises WeightUpdateError where the sender fails or is silent for ``timeout`` seconds.
        """
        source = GroupSource(names, dtypes, shapes, group_name, load_format)
        return self.update_weights(source, **options)
