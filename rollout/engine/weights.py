"""Updates of the engine's weights, and reads of the ones it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollout.engine.step_runner import StepRunner
from rollout.engine.worker import Worker
from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.models.pulled_folder import pulls_held_off
from rollout.validation import (
    checked_flag,
    checked_int,
    checked_iterable,
    checked_name,
    checked_path,
)
from rollout.weights.adapter_folder import AdapterFolder, is_adapter_folder
from rollout.weights.bucket import (
    FlattenedBucket,
    PackedBucket,
    buckets,
    offered_tensors,
    unflattened,
)
from rollout.weights.bucket_layout import BucketLayout
from rollout.weights.joined_groups import JoinedGroups
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.named_tensors import NamedTensors, manifest_of
from rollout.weights.shared_memory import HandleReceiver
from rollout.weights.transaction import WeightState
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.update_options import UpdateOptions


class WeightUpdates:
    """Brings weights to the worker's models, between two steps.

    An update names every tensor by its checkpoint name (``partial=True``: some), and reaches every
    model its selector names or none. `UpdateOptions` documents ``**options``. A call between
    `begin_weight_update` and `end_weight_update` is a part of that update and takes no options; any
    other is an update of its own, and returns what `end_weight_update` does; a part returns None.
    A failure before the first byte leaves the old weights serving; a later one leaves the engine
    refusing to run, saying why, until a full update succeeds.
    """

    def __init__(self, worker: Worker, steps: StepRunner) -> None:
        self.handles = HandleReceiver()
        self.groups = JoinedGroups()
        self._worker = worker
        self._steps = steps

    def begin_weight_update(self, /, manifest: Manifest | None = None, **options: Any) -> None:
        """Open an update that several calls bring.

        ``manifest``: all that is going to come; what is wrong with it is refused here. From the
        first byte to `end_weight_update` no step runs. Raises InvalidInputError, and
        WeightUpdateError while another update is under way.
        """
        if manifest is not None and not isinstance(manifest, Mapping):
            raise InvalidInputError("manifest", manifest, "must map names to TensorSpecs")
        for name, spec in (manifest or {}).items():
            if not isinstance(spec, TensorSpec):
                raise InvalidInputError(f"manifest[{name!r}]", spec, "must be a TensorSpec")
        with self._worker.weights.broadcast_failures():
            self._worker.weights.begin(UpdateOptions.of(options), manifest)

    def end_weight_update(self, weight_version: int | None = None) -> UpdateCounts:
        """Commit: the next step samples from the new weights. Returns how many tensors were stored
        and how many ignored.

        ``weight_version``: for a caller that begins without knowing it; one that is in use is
        refused, and the update stays open.

        The prefix cache is dropped and the n-gram corpus kept. Requests in flight go on with all
        their KV recomputed; with ``flush_cache=False`` they keep it. Where only drafts have new
        weights, everything of the target's is kept.
        """
        weights = self._worker.weights
        if weight_version is not None:
            weights.renumber(checked_int(weight_version, "weight_version", minimum=0))
        if weights.is_under_way and weights.state is WeightState.LOADING:
            # Before they serve: nothing the old weights computed may be met by the new ones,
            # whatever happens in between.
            options = weights.options
            try:
                if weights.reaches_target:
                    self._steps.drop_kv(
                        retract=options.flush_cache, abort=options.abort_all_requests
                    )
                elif options.abort_all_requests:
                    self._steps.abort_all()
            except BaseException as error:
                weights.abandon(f"leaving the old weights failed: {error}")
                raise
        counts = weights.commit()
        self._worker.weights_changed()
        self._steps.accept_lengths.begin(weights.version)
        return counts

    def abandon_weight_update(self, reason: str = "abandoned by the caller") -> None:
        """Give up the open update, if there is one: refused until a full one if it had begun."""
        self._worker.weights.abandon(reason)

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
                floating dtype. A collection or a `WeightSource` is checked through before a byte
                moves, of a generator each tensor as it comes.
            load_format: ``direct``: nothing is converted; a dtype that is not the model's is
                refused. ``flattened_bucket``: ``named_tensors`` are buckets, as `buckets` makes.

        Raises InvalidInputError, WeightUpdateError, and whatever a generator raises.
        """
        with self._worker.weights.broadcast_failures():
            pairs = offered_tensors(named_tensors, load_format)
            return self._load(pairs, options, direct=load_format == "direct")

    def update_weights_from_bucket(
        self, /, bucket: PackedBucket, *, direct: bool = False, **options: Any
    ) -> UpdateCounts | None:
        """Take a bucket that came as bytes and a layout.

        ``direct``: as ``load_format="direct"``. Raises InvalidInputError, WeightUpdateError.
        """
        if not isinstance(bucket, PackedBucket):
            raise InvalidInputError("bucket", bucket, "must be a PackedBucket")
        checked_flag(direct, "direct")
        with self._worker.weights.broadcast_failures():
            return self._load(unflattened([bucket.unpacked()]), options, direct=direct)

    def update_weights_from_disk(
        self, /, model_path: str | Path, **options: Any
    ) -> UpdateCounts | None:
        """Take the weights of a safetensors folder, sharded or not, or a LoRA adapter that PEFT
        has saved, which is the update then, with its own ``lora_scaling``.

        With a selector of drafts alone it is a draft's folder, in any layout that one can be loaded
        from. Raises CheckpointError for a missing, truncated or damaged file, for the folder of
        another draft, and while a pull into the folder is under way, before a byte moves, else what
        `update_weights_from_tensor` does.
        """
        folder = Path(checked_path(model_path, "model_path"))
        weights = self._worker.weights
        with weights.broadcast_failures(), pulls_held_off(folder):
            given = UpdateOptions.of(options) if options else weights.options
            if not is_adapter_folder(folder):
                return self._load(weights.parts.source(folder, given.selector), options)
            adapter = AdapterFolder(folder)
            if not adapter.keeps_ties and (tied := weights.parts.tied(adapter.whole)):
                raise InvalidInputError(
                    "model_path", str(folder),
                    f"replaces {', '.join(tied)}, which the model ties to another tensor: train "
                    "with ensure_weight_tying=True, or send merged weights",
                )  # fmt: skip
            if given.lora_scaling not in (None, adapter.scaling) or (
                weights.is_under_way and given.lora_scaling is None
            ):
                raise InvalidInputError(
                    "lora_scaling", given.lora_scaling, f"is {adapter.scaling} in {folder}"
                )
            own = {} if weights.is_under_way else {"lora_scaling": adapter.scaling}
            return self._load(adapter, options | own)

    def update_weights_from_ipc(
        self, /, handles: Mapping[str, Any] | Iterable[Mapping[str, Any]], **options: Any
    ) -> UpdateCounts | None:
        """Take buckets that another process of this host holds.

        ``handles``: one or several, all valid now, or an iterator that asks the sender for the next
        when the last is loaded: of `SharedMemorySender` or `CudaIpcSender`. The sender may fill
        their memory anew when this returns: all ranks have read it. Raises InvalidInputError,
        naming the field, for handles malformed or outdated.
        """
        try:
            with self._worker.weights.broadcast_failures():
                return self._load(self.handles.tensors(handles), options)
        finally:
            self.handles.release_removed()
            self._worker.ranks.all.all_gather_int(0)  # waits for all

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        timeout: float = 300.0,
        sender: str = "specrollout",
    ) -> None:
        """Join a group that weights come through, at rank ``rank_offset`` (the sender is rank 0).

        Ranks that run one model join it one after the other from ``rank_offset`` on, and count each
        in ``world_size``.

        ``sender``: what made rank 0's group. ``specrollout``: a `WeightGroup`. ``torch``: a trainer
        written for other engines, by torch's own rendezvous at that address; it broadcasts each
        tensor by itself.

        Waits for all ``world_size`` members. Raises WeightUpdateError, naming ranks, where some are
        missing after ``timeout`` seconds or were told another size. An update through it that says
        no timeout of its own waits as long.
        """
        rank_offset = checked_int(rank_offset, "rank_offset")
        self.groups.init(
            master_address, master_port, rank_offset + self._worker.ranks.all.rank, world_size,
            group_name, backend, timeout, self._worker.model_device, sender,
        )  # fmt: skip

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Leave a group. Raises InvalidInputError for one this engine is not in."""
        self.groups.destroy(group_name)

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
        """Take the tensors that the group's rank 0 sends meanwhile.

        Args:
            load_format: None: the sender broadcasts each tensor by itself, in this order.
                ``packed``: joined to buffers of a GiB, as vLLM's senders do; ``packed:BYTES``: of
                so many bytes.
                ``flattened_bucket``: it is a `DistributedSender`, whose ``arguments`` these are.

        Raises InvalidInputError before anything is written, WeightUpdateError where the sender
        fails or is silent for ``timeout`` seconds.
        """
        weights = self._worker.weights
        timeout = options.get("timeout", weights.options.timeout if weights.is_under_way else None)
        with (
            weights.broadcast_failures(),
            self.groups.source(
                names, dtypes, shapes, group_name, load_format=load_format, timeout=timeout
            ) as source,
        ):
            return self._load(source, options)

    def decline_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        reason: str,
        *,
        load_format: str | None = None,
    ) -> None:
        """Tell the group's sender that nothing of what it announced will be taken."""
        with (
            contextlib.suppress(WeightUpdateError),
            self.groups.source(
                names, dtypes, shapes, group_name, load_format=load_format, timeout=None
            ),
        ):
            raise WeightUpdateError(reason)

    def weights_manifest(
        self, selector: str = "all", *, model_path: str | Path | None = None
    ) -> dict[str, TensorSpec]:
        """The manifest of a full update; with ``model_path``, of one from that folder.

        Raises what `update_weights_from_disk` does.
        """
        parts = self._worker.weights.parts
        if model_path is None:
            return dict(parts.manifest(selector))
        return dict(parts.source(Path(checked_path(model_path, "model_path")), selector).manifest())

    def read_weights(self, names: Sequence[str]) -> PackedBucket:
        """Whole copies of these tensors, for another engine's `update_weights_from_bucket`.

        Raises InvalidInputError for an unknown name, WeightUpdateError while the weights are not
        those of one version, EngineStateError while they are released.
        """
        names = [
            checked_name(name, "names") for name in checked_iterable(names, "names", "tensor names")
        ]
        self._worker.weights.require_whole()
        tensors = dict(self._worker.weights.parts.read(names))
        empty = FlattenedBucket(torch.empty(0, dtype=torch.uint8), BucketLayout(()))
        return PackedBucket.of(next(buckets(tensors.items(), 1 << 62), empty))

    def weights_digest(self, selector: str = "all") -> str:
        """SHA-256 over names, dtypes, shapes and bytes of the weights, in hexadecimal."""
        return self._worker.weights.digest(selector)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[float]:
        """The first values of a tensor, flattened. Raises InvalidInputError for an unknown name."""
        checked_name(name, "name")
        truncate_size = checked_int(truncate_size, "truncate_size", minimum=1)
        self._worker.weights.require_resident()
        for part in self._worker.weights.parts.values():
            loader = part.weight_loaders().get(name)
            if loader is not None:
                return loader.read().flatten()[:truncate_size].float().tolist()
        raise InvalidInputError("name", name, "is no tensor of this model")

    def close(self) -> None:
        """Leave the weight groups and let go of senders' memory; updates can go on as before."""
        self.groups.close()
        self.handles.release()

    def _load(
        self, named_tensors: NamedTensors, options: dict[str, Any], *, direct: bool = False
    ) -> UpdateCounts | None:
        """One whole update, or a part of the one that is under way."""
        weights = self._worker.weights
        if weights.is_under_way:
            if options:
                names = ", ".join(options)
                raise InvalidInputError("options", names, "are set by begin_weight_update alone")
            weights.load(named_tensors, direct=direct)
            return None
        expired = weights.expired
        try:
            manifest = manifest_of(named_tensors)
            weights.begin(UpdateOptions.of(options), manifest, named_tensors, direct=direct)
            weights.load(named_tensors, direct=direct)
            return self.end_weight_update()
        except RolloutError as error:
            if expired and not options:
                error.add_note(f"an update that was begun before has ended: {expired}")
            raise
