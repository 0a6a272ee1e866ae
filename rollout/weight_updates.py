"""The engine's calls that bring new weights, and those that look at the ones it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rollout.errors import InvalidInputError
from rollout.weights.manifest import Manifest, NamedTensors, manifest_of
from rollout.weights.options import UpdateOptions
from rollout.weights.transaction import WeightTransaction
from rollout.worker import Worker


class WeightCalls(ABC):
    """A part of RolloutEngine. All of these are called between two steps.

    An update names every tensor by its checkpoint name (``partial=True``: some), and reaches every
    model its selector names or none. What ``**options`` are says `UpdateOptions`. A call between
    `begin_weight_update` and `end_weight_update` is a part of that update and takes no options; any
    other is an update of its own. A failure before the first byte leaves the old weights serving;
    a later one leaves the engine refusing to run, saying why, until a full update succeeds.
    """

    worker: Worker

    @property
    def weight_version(self) -> int:
        return self.worker.weights.version

    def begin_weight_update(self, manifest: Manifest | None = None, **options: Any) -> None:
        """Open an update that several calls bring.

        ``manifest``: all that is going to come; what is wrong with it is refused here. From the
        first byte to `end_weight_update` no step runs. Raises InvalidInputError, and
        WeightUpdateError while another update is under way.
        """
        self.worker.weights.begin(UpdateOptions(**options), manifest)

    def end_weight_update(self) -> None:
        """Commit: the next step samples from the new weights.

        The prefix cache is dropped and the n-gram corpus kept. Requests in flight go on with all
        their KV recomputed; with ``flush_cache=False`` they keep it.
        """
        weights = self.worker.weights
        options = weights.commit()
        self.worker.weights_changed()
        self._leave_old_weights(retract=options.flush_cache, abort=options.abort_all_requests)

    def abandon_weight_update(self, reason: str = "abandoned by the caller") -> None:
        """Give up the open update, if there is one: refused until a full one if it had begun."""
        self.worker.weights.abandon(reason)

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, *, load_format: str | None = None, **options: Any
    ) -> None:
        """Take weights that are in this process.

        Args:
            named_tensors: pairs of checkpoint name and tensor, on any device, of any floating
                dtype. A collection or a `WeightSource` is checked through before a byte moves, of
                a generator each tensor as it comes.
            load_format: ``direct``: nothing is converted; a dtype that is not the model's is
                refused.

        Raises InvalidInputError, WeightUpdateError, and whatever a generator raises.
        """
        if load_format not in (None, "direct"):
            raise InvalidInputError("load_format", load_format, "must be None or direct")
        direct = load_format == "direct"
        manifest = manifest_of(named_tensors)
        self._update(lambda weights: weights.load(named_tensors, direct=direct), manifest, options)

    def weights_digest(self, selector: str = "all") -> str:
        """SHA-256 over names, dtypes, shapes and bytes of the weights, in hexadecimal."""
        return self.worker.weights.digest(selector)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[float]:
        """The first values of a tensor, flattened. Raises InvalidInputError for an unknown name."""
        self.worker.weights.require_resident()
        for part in self.worker.weights.parts.values():
            destination = part.destinations().get(name)
            if destination is not None:
                return destination.read().flatten()[:truncate_size].float().tolist()
        raise InvalidInputError("name", name, "is no tensor of this model")

    def _update(
        self,
        load: Callable[[WeightTransaction], None],
        manifest: Manifest | None,
        options: dict[str, Any],
    ) -> None:
        """One whole update, or a part of the one that is under way."""
        weights = self.worker.weights
        if weights.is_under_way:
            if options:
                names = ", ".join(options)
                raise InvalidInputError("options", names, "are set by begin_weight_update alone")
            load(weights)
            return
        self.begin_weight_update(manifest, **options)
        load(weights)
        self.end_weight_update()

    @abstractmethod
    def _leave_old_weights(self, *, retract: bool, abort: bool) -> None: ...
