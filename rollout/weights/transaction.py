"""A weight update reaches every model it names whole, or nothing is served.

States::

              begin            first write             commit
    WHOLE ------------> OPEN ---------------> LOADING --------> WHOLE (versions bumped)
      ^                  | failed, abandoned     | failed, abandoned
      +------------------+                       v
                                               TORN --begin--> OPEN ... full updates commit

WHOLE and, where nothing was torn before, OPEN serve: in OPEN no byte has moved yet. What is known
beforehand is checked in `begin`. Only parts that an update names are torn by it, and only an update
that names every tensor of a torn part heals that part. Nothing is generated until every part is
whole, drafts included: with a broken draft the engine would only be slow, and nobody would learn
why. Every transport ends in begin, load, commit, abandon.

Ranks that run one model each have a transaction, and make the same calls. Both ends of an update
are agreed on: no rank writes before all have found what is to come right, and none serves before
all have written everything. What keeps one rank from it is an error on all.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.models.layers.weight_loader import WeightLoader
from rollout.parallel import RankGroup, SingleRank
from rollout.weights import checks
from rollout.weights.manifest import (
    Manifest,
    NamedTensors,
    StoredWeights,
    TensorSpec,
    UpdateOptions,
    closed_iterator,
)
from rollout.weights.parts import WeightPart, WeightParts

TARGET = "target"
"""The part whose version tokens carry. Others only propose: their updates leave it alone."""


class WeightState(enum.Enum):
    """The states of the weights during an update; see the diagram above."""

    WHOLE = "whole"
    OPEN = "open"
    LOADING = "loading"
    TORN = "torn"


@dataclass(slots=True)
class _Update:
    """The update that is under way."""

    options: UpdateOptions
    versions: dict[str, int]  # of its parts, once it is committed
    parts: frozenset[str]
    weight_loaders: Mapping[str, WeightLoader]
    passes_over: Callable[[str], bool]
    manifest: Manifest | None
    before: WeightState
    last_call: float  # seconds, by the transaction's clock
    checked: dict[str, TensorSpec] = field(default_factory=dict)  # fit, and may come
    loaded: dict[str, TensorSpec] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return self.versions.get(TARGET, max(self.versions.values()))

    def takes(self, name: str) -> bool:
        return name in self.weight_loaders or not self.passes_over(name)

    def taken(self, manifest: Manifest) -> Manifest:
        return {name: spec for name, spec in manifest.items() if self.takes(name)}


class WeightTransaction:
    """Owns the weight versions of a worker's models and whether they may serve.

    ``parts``: by the names selectors use, the target first; see `WeightParts`. ``passes_over``:
    of a name no part in question has, whether checkpoints have it all the same: then what comes
    under it goes nowhere. ``ranks``: those that run the same models, each a part.
    """

    def __init__(
        self,
        parts: Mapping[str, WeightPart],
        clock: Callable[[], float] = time.monotonic,
        passes_over: Callable[[str], bool] = lambda name: False,
        ranks: RankGroup | None = None,
    ) -> None:
        self.parts = WeightParts(parts)
        self._passes_over = passes_over
        self._ranks: RankGroup = ranks or SingleRank()
        self._number = 0  # of the last update that was begun or declined, alike on all ranks
        self._versions: dict[str, int] = {}  # of parts that were ever updated
        self.state = WeightState.WHOLE
        self.reason = ""  # why it does not serve
        self.is_resident = True  # False while the memory of the parts is given back
        self._clock = clock
        self._update: _Update | None = None
        self._torn: dict[str, str] = {}  # parts whose values are lost, and how they were
        self.expired = ""  # why the last update ended, if it was for silence

    @property
    def version(self) -> int:
        """The target's: that of the tokens it samples."""
        return self._versions.get(TARGET, 0)

    @property
    def versions(self) -> dict[str, int]:
        """Weight version by part. Each counts the updates that reached the part, or is the number
        its last one gave."""
        return {part: self._versions.get(part, 0) for part in self.parts}

    @property
    def serves(self) -> bool:
        """Whether the weights are those of one version, and resident."""
        state = self._update.before if self._update else self.state
        whole = state is WeightState.WHOLE and self.state is not WeightState.LOADING
        return whole and self.is_resident

    @property
    def is_under_way(self) -> bool:
        """Whether an update is between begin and commit. Finds out on the way that a sender has
        gone silent."""
        self._abandon_if_silent()
        return self._update is not None

    @property
    def reaches_target(self) -> bool:
        """Whether the update under way does: if not, what the target computed stays true."""
        return self._update is not None and TARGET in self._update.parts

    @property
    def options(self) -> UpdateOptions:
        """The options of the update under way, else the defaults."""
        return UpdateOptions() if self._update is None else self._update.options

    def require_whole(self) -> None:
        """Raises WeightUpdateError unless the weights are those of one version, EngineStateError
        while they are released."""
        self.require_resident()
        self._abandon_if_silent()
        if not self.serves:
            raise WeightUpdateError(f"the weights are {self.state.value}: {self.reason}")

    def require_resident(self) -> None:
        """Raises EngineStateError while the weights are released."""
        if not self.is_resident:
            raise EngineStateError(
                "the weights are released: call resume_memory(['weights']) first"
            )

    def begin(self, options: UpdateOptions, manifest: Manifest | None = None) -> None:
        """Open an update.

        ``manifest``: all that is going to come; wrong names, shapes and dtypes are then refused
        here. Raises InvalidInputError, and WeightUpdateError while another update is under way,
        which goes on, or where this one would build on torn values that it does not replace, and
        EngineStateError while the weights are released; nothing has changed then.
        """
        self._number += 1
        try:
            update = self._opened(options, manifest)
        except BaseException as error:
            self._post("begin", error)
            raise
        self._agree("begin")
        self._update = update
        self.state, self.expired = WeightState.OPEN, ""

    def _opened(self, options: UpdateOptions, manifest: Manifest | None) -> _Update:
        self.require_resident()
        self._abandon_if_silent()
        if self._update is not None:
            raise WeightUpdateError(
                f"an update to version {self._update.version} is under way; end or abandon it first"
            )
        parts = self.parts.selected(options.selector)
        versions = self._next_versions(parts, options.weight_version)
        built_on = self.parts.lenders(parts) | (parts if options.partial else frozenset())
        if built_on & self._torn.keys():
            raise WeightUpdateError(
                f"the weights are torn: {self.reason}; partial={options.partial} and "
                f"selector={options.selector!r} cannot heal them"
            )
        update = _Update(
            options=options,
            versions=versions,
            parts=parts,
            weight_loaders=self.parts.weight_loaders(parts),
            passes_over=self._passes_over,
            manifest=None,
            before=self.state,
            last_call=self._clock(),
        )
        if manifest is not None:
            update.manifest = update.taken(manifest)
            update.checked.update(update.manifest)
            checks.refuse_mismatches(
                update.weight_loaders, update.manifest, partial=options.partial
            )
        return update

    @contextmanager
    def broadcast_failures(self) -> Iterator[None]:
        """A context for a call that begins an update: a failure before that is broadcast to all
        ranks."""
        number = self._number
        try:
            yield
        except BaseException as error:
            if self._number == number and self._update is None:
                self._number += 1
                self._post("begin", error)
            raise

    def load(
        self, named_tensors: NamedTensors, *, manifest: Manifest | None = None, direct: bool = False
    ) -> None:
        """Write tensors of the open update; called as often as they come.

        What is known of ``named_tensors`` beforehand is checked before the first is written: all of
        a collection or of `StoredWeights`, the manifest of any other `WeightSource`; what streams
        is checked as it comes. ``manifest``: that of ``named_tensors``, if the caller has it.
        ``direct``: nothing is converted, the dtype must be the model's. Any failure ends the
        update. Raises InvalidInputError, and what ``named_tensors`` raises.
        """
        update = self._under_way()
        streams = not isinstance(named_tensors, Collection | StoredWeights)
        check_finite = update.options.check_finite and streams
        try:
            if manifest is None:
                manifest = checks.manifest_of(named_tensors)
            if manifest is not None:
                _check_incoming(update, update.taken(manifest), direct)
            if not streams:
                _check_values(update, named_tensors)
            with closed_iterator(named_tensors) as tensors:
                for pair in tensors:
                    name, tensor = checks.checked_pair(pair)
                    if update.takes(name):
                        self._write(update, name, tensor, direct, check_finite)
        except BaseException as error:
            self.abandon(f"it failed: {error}")
            raise
        update.last_call = self._clock()

    def commit(self) -> None:
        """End the open update: its version is the weights' from now on.

        Raises InvalidInputError where tensors did not come; the update has then failed.
        """
        update = self._under_way()
        try:
            if not update.loaded:
                raise InvalidInputError("named_tensors", [], "an update must bring a tensor")
            checks.refuse_mismatches(
                update.weight_loaders, update.loaded, partial=update.options.partial
            )
            for part in sorted(update.parts):
                self.parts[part].finish_loading()
            self._agree("commit")
        except BaseException as error:
            self.abandon(f"it failed: {error}")
            raise
        self._update = None
        self._versions |= update.versions
        for part in update.parts:
            self._torn.pop(part, None)
        self._update_state()

    def abandon(self, reason: str) -> None:
        """Give the open update up, if there is one: torn if it had written, else as it was."""
        update, self._update = self._update, None
        if update is None:
            return
        self._post("commit", reason)
        if self.state is WeightState.LOADING:
            self.tear(
                update.parts,
                f"an update to version {update.version} stopped after {len(update.loaded)} tensors "
                f"({_shown(update.loaded)}): {reason}",
            )
        else:
            self.state = update.before

    def tear(self, parts: Iterable[str], reason: str) -> None:
        """The values of these parts are lost: only a full update makes them serve again."""
        self._torn |= dict.fromkeys(parts, reason)
        self._update_state()

    def digest(self, selector: str = "all") -> str:
        """SHA-256 over the names, dtypes, shapes and bytes of every tensor, in hexadecimal."""
        self.require_resident()
        return self.parts.digest(selector)

    def _post(self, end: str, failure: object) -> None:
        self._ranks.post(f"update {self._number} {end}", str(failure) or type(failure).__name__)

    def _agree(self, end: str) -> None:
        """Raises WeightUpdateError where another rank has failed."""
        topic = f"update {self._number} {end}"
        self._ranks.post(topic, "")
        for rank, failure in enumerate(self._ranks.collect(topic)):
            if failure:
                raise WeightUpdateError(f"rank {rank}: {failure}")

    def _next_versions(self, parts: frozenset[str], given: int | None) -> dict[str, int]:
        """``given`` numbers the target where it is among the parts, else all of them.

        No token carries a draft's, so that one may be given twice.
        """
        in_use = self.versions
        following = {part: in_use[part] + 1 for part in parts}
        if given is None:
            return following
        if TARGET in parts and given == in_use[TARGET]:
            raise InvalidInputError("weight_version", given, "must differ from the one in use")
        return following | dict.fromkeys({TARGET} & parts or parts, given)

    def _update_state(self) -> None:
        """Set the state to torn while any part is torn, else to whole."""
        if not self._torn:
            self.state, self.reason = WeightState.WHOLE, ""
            return
        self.state = WeightState.TORN
        self.reason = (
            f"{'; '.join(dict.fromkeys(self._torn.values()))}; "
            f"send an update that names every tensor of {', '.join(sorted(self._torn))}"
        )

    def _write(
        self, update: _Update, name: str, tensor: torch.Tensor, direct: bool, check_finite: bool
    ) -> None:
        checks.refuse_unreadable(name, tensor)
        spec = TensorSpec.of(tensor)
        if direct or update.checked.get(name) != spec or name in update.loaded:
            _check_incoming(update, {name: spec}, direct)
        if check_finite:
            checks.refuse_not_finite(name, tensor)
        self.state, self.reason = WeightState.LOADING, "an update is under way"
        update.weight_loaders[name].write(tensor)
        update.loaded[name] = spec

    def _under_way(self) -> _Update:
        self._abandon_if_silent()
        if self._update is None:
            why = self.reason or self.expired
            raise WeightUpdateError(f"no update is under way{why and ': ' + why}")
        self._update.last_call = self._clock()
        return self._update

    def _abandon_if_silent(self) -> None:
        update = self._update
        if update is not None and self._clock() - update.last_call > update.options.timeout:
            self.expired = f"nothing came for {update.options.timeout:g} seconds"
            self.abandon(self.expired)


def _check_values(update: _Update, named_tensors: NamedTensors) -> None:
    """Read tensors through that are all there, for what shapes and dtypes do not say."""
    weight_loaders = update.weight_loaders
    tied = {name for name, it in weight_loaders.items() if it.alias_of is not None}
    tied |= {weight_loaders[name].alias_of or name for name in tied}
    twins: dict[str, torch.Tensor] = {}
    with closed_iterator(named_tensors) as tensors:
        for name, tensor in tensors:
            if not update.takes(name):
                continue
            if update.options.check_finite:
                checks.refuse_not_finite(name, tensor)
            if weight_loaders[name].is_borrowed:
                weight_loaders[name].write(tensor)  # which compares
            if name in tied:
                twins[name] = tensor
    checks.refuse_untied(weight_loaders, twins)


def _check_incoming(update: _Update, incoming: Manifest, direct: bool) -> None:
    news = {
        name: spec
        for name, spec in incoming.items()
        if update.checked.get(name) != spec or name in update.loaded
    }
    if news:
        checks.refuse_incoming(update.weight_loaders, update.manifest, update.loaded, news)
    if direct:
        checks.refuse_conversion(update.weight_loaders, incoming)
    update.checked.update(incoming)


def _shown(names: Collection[str]) -> str:
    return ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
