"""Brings the weights in use to a replica that starts with those of the checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from rollout.cluster.replica import Replica
from rollout.cluster.replica_manager import ReplicaManager
from rollout.engine.engine import RolloutEngine
from rollout.errors import EngineStateError, IntegrityError, WeightUpdateError
from rollout.weights.bucket import CACHED_BUCKET_BYTES
from rollout.weights.bucket_layout import layouts
from rollout.weights.update_options import UpdateOptions

log = logging.getLogger(__name__)


class ReplicaWeightSync:
    """Copies weights from a replica that has them to one that starts, and compares digests.

    The replicas are the only ones to hold what an update brought. When the last of them dies, it is
    lost, and the cluster generates nothing before a full update.
    """

    def __init__(self, replicas: ReplicaManager) -> None:
        self._replicas = replicas
        self._is_held = False
        self._updated = False  # since the replicas read their checkpoint
        self.why_lost = ""
        self._lock = threading.Lock()  # held for:
        self._bringing: set[Future[None]] = set()
        self._waiting: list[Future[None]] = []  # of replicas that may not join yet
        replicas.on_join(self.bring)

    @property
    def is_busy(self) -> bool:
        """Whether a replica is being brought weights now."""
        with self._lock:
            return any(not future.done() for future in self._bringing)

    def hold(self) -> None:
        """An update has begun; no replica joins until `release`."""
        self._is_held = True
        self._replicas.repeat_joins()

    def release(self) -> None:
        """The update has finished; waiting replicas may join."""
        self._is_held = False
        self.try_again()

    def note_commit(self) -> None:
        """A commit begins: the weights may differ from the checkpoint's from here on."""
        self._updated = True

    def note_update(self, options: UpdateOptions) -> None:
        """The update is committed on every live replica."""
        if not options.partial and options.selector in ("all", "target"):
            self.why_lost = ""

    def bring(self, replica: Replica) -> Future[None] | None:
        """Bring a joiner to the weights in use; see `ReplicaManager.on_join`."""
        if self._is_held:
            future: Future[None] = Future()
            self._wait(future)
            return future
        if not self._replicas.joined:
            self._note_loss()
            self._let_go()
            return None
        if not self._updated:
            return None
        future = Future()
        with self._lock:
            self._bringing = {each for each in self._bringing if not each.done()} | {future}
        peer = next(iter(self._replicas.joined.values()))
        threading.Thread(
            target=self._copy, args=(peer, replica, future), name=f"weights of {replica.name}",
            daemon=True,
        ).start()  # fmt: skip
        return future

    def try_again(self) -> None:
        """Let waiting replicas begin to join anew: weights may be whole, or resident, again."""
        self._replicas.repeat_joins()
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)

    def _wait(self, future: Future[None]) -> None:
        with self._lock:
            self._waiting.append(future)

    def _note_loss(self) -> None:
        if self._updated:
            self._updated = False
            self.why_lost = (
                "every replica that had the updated weights died; send an update that names every "
                "tensor of the target"
            )
            log.error("the cluster generates nothing: %s", self.why_lost)

    def _copy(self, peer: Replica, replica: Replica, future: Future[None]) -> None:
        try:
            try:
                peer.call(RolloutEngine.read_weights, []).result()
            except (WeightUpdateError, EngineStateError) as error:  # torn, or given back
                log.info("%s waits for weights: %s", replica.name, error)
                with self._lock:
                    self._bringing.discard(future)
                    self._waiting.append(future)
                return
            copy_weights(peer, replica)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)


def copy_weights(source: Replica, receiver: Replica) -> None:
    """Part by part, bucket by bucket. Raises what either raises, IntegrityError if they differ."""
    versions, brought = (_versions(each) for each in (source, receiver))
    for part, version in versions.items():
        if version == brought[part]:
            continue  # never updated, or brought before it began to join anew
        manifest = source.call(RolloutEngine.weights_manifest, part).result()
        receiver.call(
            RolloutEngine.begin_weight_update, manifest, selector=part, weight_version=version
        )
        for layout in layouts(manifest, CACHED_BUCKET_BYTES):
            bucket = source.call(
                RolloutEngine.read_weights, [each.name for each in layout.entries]
            ).result()
            receiver.call(RolloutEngine.update_weights, bucket).result()
        receiver.call(RolloutEngine.end_weight_update).result()
    digests: list[Any] = [each.call(RolloutEngine.weights_digest) for each in (source, receiver)]
    ours, theirs = (digest.result() for digest in digests)
    if ours != theirs:
        raise IntegrityError(f"{receiver.name} has other weights than {source.name}, which it had")


def _versions(replica: Replica) -> Mapping[str, int]:
    return replica.call(RolloutEngine.status).result().weight_versions
