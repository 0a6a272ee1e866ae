"""A cluster's weight updates: every replica gets them, or none does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.cluster.replica import Replica
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.cluster.replica_weight_sync import ReplicaWeightSync
from rollout.engine.engine import RolloutEngine
from rollout.errors import IntegrityError, InvalidInputError, RolloutError, WeightUpdateError
from rollout.validation import checked_int
from rollout.weights.bucket import CACHED_BUCKET_BYTES, PackedBucket, buckets
from rollout.weights.disk_source import DiskSource
from rollout.weights.distributed import GroupSource
from rollout.weights.manifest import Manifest
from rollout.weights.shared_memory import HandleSource
from rollout.weights.source import (
    WeightSource,
    WeightTensors,
    closed_iterator,
    not_a_source,
    refuse_not_finite,
)
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.update_options import UpdateOptions, refuse_options_of_part
from rollout.weights.versions import TARGET, next_versions

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Update:
    options: UpdateOptions
    version: int | None  # of the target, where it is reached
    replicas: frozenset[Replica]  # whose it is
    last_call: float = field(default_factory=time.monotonic)


class ClusterWeights:
    """Weight updates of a cluster. `RolloutEngine` documents the calls.

    An update begins on all replicas, loads on all, then commits on all. What one refuses is
    abandoned on all: they are as they were if no byte has moved anywhere, else all are torn. Once
    one has committed, a replica that cannot is killed; like one that dies meanwhile, it is started
    anew and brought up to date. No replica joins during an update, which is abandoned when all that
    take part in it have died. No number is given to two policies, unless the caller does.

    Args:
        abort_all: ends every request of the cluster with the tokens there are.
        num_ranks: ranks of each replica.
    """

    def __init__(
        self, replicas: ReplicaManager, abort_all: Callable[[], None], num_ranks: int
    ) -> None:
        self.sync = ReplicaWeightSync(replicas)
        self._replicas = replicas
        self._abort_all = abort_all
        self._num_ranks = num_ranks
        self._update: _Update | None = None
        self.versions: Mapping[str, int] = {}  # of all parts, the same on all replicas
        self._last_version = 0  # of the target; also of a commit that was lost with its replicas
        self._groups: dict[str, frozenset[Replica]] = {}  # by name: who is in it

    def start_from(self, versions: Mapping[str, int]) -> None:
        """Take the versions that all replicas have, when the first ones have joined."""
        self.versions = versions
        self._last_version = versions["target"]

    def begin_weight_update(self, /, manifest: Manifest | None = None, **options: Any) -> None:
        checked = UpdateOptions.of(options)
        if checked.lora_scaling is not None:
            raise InvalidInputError(
                "lora_scaling", checked.lora_scaling,
                "a cluster takes merged weights: a replica that joins later has no base to add to",
            )  # fmt: skip
        _check_version(checked.weight_version)
        self._abandon_if_silent()
        if self._update is not None:
            raise WeightUpdateError("an update is under way; end or abandon it first")
        self._wait_for_newcomers()
        self.sync.hold()
        version = None
        if checked.selector in ("all", "target"):
            version = checked.weight_version or self._last_version + 1
            options |= {"weight_version": version}
        self._update = _Update(checked, version, frozenset(self._replicas.joined.values()))
        try:
            self._on_all(RolloutEngine.begin_weight_update, manifest, **options)
        except BaseException:
            self.abandon_weight_update()
            raise

    def end_weight_update(self, weight_version: int | None = None) -> UpdateCounts:
        update = self._under_way()
        if weight_version is not None:
            _check_version(weight_version)
            if update.version is not None:
                next_versions(self.versions, frozenset({TARGET}), weight_version)
                update.version = weight_version
        if update.options.abort_all_requests:
            self._abort_all()
            self._under_way()
        self.sync.note_commit()
        self._last_version = update.version or self._last_version
        done, failed = self._ask_all(RolloutEngine.end_weight_update, weight_version)
        if not done:
            reason = next(iter(failed.values()), WeightUpdateError("every replica died"))
            self.abandon_weight_update(f"it failed: {reason}")
            raise reason
        for replica, error in failed.items():
            log.error(
                "%s could not commit what others did, and is started anew: %s", replica.name, error
            )
            replica.kill()
            self._replicas.wait_until_gone(replica)
        statuses, _ = self._replicas.outcomes(
            {each: each.call(RolloutEngine.status) for each in done}
        )
        if not statuses:
            reason = WeightUpdateError("every replica died that had committed it")
            self.abandon_weight_update(str(reason))
            raise reason
        self._update = None
        self.versions = next(iter(statuses.values())).weight_versions
        self.sync.note_update(update.options)
        self.sync.release()
        return next(iter(done.values()))

    def abandon_weight_update(self, reason: str = "abandoned by the caller") -> None:
        if self._update is None:
            return
        self._update = None
        self._ask_all(RolloutEngine.abandon_weight_update, reason)
        self.sync.release()

    def update_weights(self, source: WeightSource, /, **options: Any) -> UpdateCounts | None:
        """Tensors are copied once, into memory that all replicas of a host share. Each replica
        reads a folder itself, under the same path; handles must be of its host.

        Raises WeightUpdateError, too, where a replica was replaced since a group was made.
        """
        if not isinstance(source, WeightSource):
            raise not_a_source(source)
        if isinstance(source, GroupSource):
            self._require_members(source.group_name)
        self._abandon_if_silent()
        is_part = self._update is not None
        try:
            if is_part:
                refuse_options_of_part(options)
            else:
                self.begin_weight_update(self._manifest(source, options), **options)
        except RolloutError as error:
            if isinstance(source, GroupSource):  # its sender waits for a receiver
                self._ask_all(RolloutEngine.decline_weights, source, str(error))
            raise
        try:
            update = self._under_way()
            self._load(source, update.options)
            update.last_call = time.monotonic()  # however long it took
            return None if is_part else self.end_weight_update()
        except BaseException as error:
            self.abandon_weight_update(f"it failed: {error}")
            raise

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        timeout: float = 300.0,
    ) -> None:
        """The replicas take the ranks from ``rank_offset`` on, in the order of their names, each as
        many as its model has.

        Raises WeightUpdateError, too, where one that died is not there again within ``timeout``
        seconds: the sender counts on it.
        """
        if group_name in self._groups:
            raise InvalidInputError("group_name", group_name, "is joined already: destroy it first")
        deadline = time.monotonic() + timeout
        while not self._replicas.all_joined:
            if time.monotonic() > deadline:
                raise WeightUpdateError(f"not all replicas are there after {timeout:g} s")
            self._replicas.poll(WAIT_SECONDS)
        names = sorted(self._replicas.joined)
        ranks = {name: rank_offset + i * self._num_ranks for i, name in enumerate(names)}
        done, failed = self._replicas.outcomes({
            each: each.call(
                RolloutEngine.init_weights_update_group, master_address, master_port,
                ranks[each.name], world_size, group_name, backend, timeout,
            )
            for each in self._living()
        })  # fmt: skip
        if failed or len(done) < len(ranks):
            for answer in [
                each.call(RolloutEngine.destroy_weights_update_group, group_name) for each in done
            ]:
                answer.exception()
            raise next(iter(failed.values()), WeightUpdateError("a replica died meanwhile"))
        self._groups[group_name] = frozenset(done)

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        members = self._group(group_name)
        del self._groups[group_name]
        for answer in [
            each.call(RolloutEngine.destroy_weights_update_group, group_name) for each in members
        ]:
            answer.exception()  # of one that died, or of a group whose sender is gone

    def weights_digest(self, selector: str = "all") -> str:
        """The digest that all replicas share. Raises IntegrityError where they differ."""
        digests = self._replicas.on_all(RolloutEngine.weights_digest, selector)
        if len(set(digests.values())) > 1:
            raise IntegrityError(f"the replicas' weights differ: {digests}")
        return next(iter(digests.values()))

    @property
    def unavailable_reason(self) -> str:
        """Why the cluster has no weights to serve, beside what replicas say of themselves."""
        self._abandon_if_silent()
        return self.sync.why_lost

    def _manifest(self, source: WeightSource, options: dict[str, Any]) -> Manifest | None:
        """All that the source brings, where it is known: of a folder, to the replicas alone."""
        if not isinstance(source, DiskSource):
            return source.manifest()
        path, selector = str(source.model_path), UpdateOptions.of(options).selector
        first, *others = self._on_all(
            RolloutEngine.weights_manifest, selector, model_path=path
        ).values()
        if any(other != first for other in others):
            raise InvalidInputError("model_path", path, "is not the same folder on every host")
        return first

    def _load(self, source: WeightSource, options: UpdateOptions) -> None:
        if isinstance(source, WeightTensors):
            if options.check_finite:
                for name, tensor in source.tensors_to_check():
                    refuse_not_finite(name, tensor)
            self._load_stream(source)
            return
        for each in source.split() if isinstance(source, HandleSource) else [source]:
            self._on_all(RolloutEngine.update_weights, each)

    def _load_stream(self, tensors: WeightTensors) -> None:
        """Replicas load one bucket while the next is packed."""
        wait: Callable[[], Any] = lambda: None  # noqa: E731
        with closed_iterator(buckets(tensors, CACHED_BUCKET_BYTES)) as stream:
            for bucket in stream:
                packed = PackedBucket.of(bucket, is_direct=tensors.is_direct)
                shared = self._replicas.share(packed)
                wait()
                wait = self._send_all(RolloutEngine.update_weights, shared)
            wait()

    def _under_way(self) -> _Update:
        self._abandon_if_silent()
        if self._update is None:
            raise WeightUpdateError("no update is under way")
        self._update.last_call = time.monotonic()
        return self._update

    def _abandon_if_silent(self) -> None:
        update = self._update
        if update is not None and time.monotonic() - update.last_call > update.options.timeout:
            self.abandon_weight_update(f"nothing came for {update.options.timeout:g} seconds")

    def abandon_if_dead(self) -> None:
        """Give up an update whose replicas are all dead: replicas that start wait for its end."""
        if self._update is not None and not self._living():
            self.abandon_weight_update("every replica died")

    def _wait_for_newcomers(self) -> None:
        """Wait until a replica can be updated, and none is being brought the current weights."""
        while not self._replicas.joined or self.sync.is_busy:
            self._replicas.poll(WAIT_SECONDS)

    def _require_members(self, group_name: str) -> None:
        strangers = set(self._replicas.joined.values()) - self._group(group_name)
        if strangers:
            raise WeightUpdateError(
                f"{', '.join(sorted(each.name for each in strangers))} came after the group "
                f"{group_name} was made: destroy it and make it again"
            )

    def _group(self, group_name: str) -> frozenset[Replica]:
        if group_name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise InvalidInputError(
                "group_name", group_name, f"is no group of this cluster, which has: {known}"
            )
        return self._groups[group_name]

    def _on_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[Replica, Any]:
        """Re-raises the first failure; WeightUpdateError if no replica is alive."""
        return self._send_all(method, *args, **kwargs)()

    def _send_all(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[[], dict[Replica, Any]]:
        answers = {each: each.call(method, *args, **kwargs) for each in self._living()}

        def wait() -> dict[Replica, Any]:
            done, failed = self._replicas.outcomes(answers)
            if failed:
                raise next(iter(failed.values()))
            if not done:
                raise WeightUpdateError("every replica died")
            return done

        return wait

    def _ask_all(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[dict[Replica, Any], dict[Replica, Exception]]:
        return self._replicas.outcomes(
            {each: each.call(method, *args, **kwargs) for each in self._living()}
        )

    def _living(self) -> list[Replica]:
        """The replicas that have joined; during an update, those that take part in it."""
        joined = self._replicas.joined.values()
        update = self._update
        return [each for each in joined if update is None or each in update.replicas]


def _check_version(weight_version: int | None) -> None:
    if weight_version is not None and checked_int(weight_version, "weight_version") < 1:
        raise InvalidInputError(
            "weight_version", weight_version, "must be >= 1: a replica that starts has version 0"
        )
