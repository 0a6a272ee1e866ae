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

Ranks that run one model each have a transaction, and make the same calls. They agree on both ends
of an update, and on each call of several: none writes before all have checked what is known, none
serves before all have written everything. What keeps one rank from it is an error on all.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from rollout.errors import EngineStateError, WeightUpdateError
from rollout.parallel import RankGroup, SingleRank
from rollout.weights.manifest import Manifest
from rollout.weights.open_update import OpenUpdate
from rollout.weights.parts import WeightPart, WeightParts
from rollout.weights.source import WeightTensors
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.update_options import UpdateOptions
from rollout.weights.versions import TARGET, next_versions, require_base

log = logging.getLogger(__name__)


class WeightState(enum.Enum):
    """The states of the weights during an update; see the diagram above."""

    WHOLE = "whole"
    OPEN = "open"
    LOADING = "loading"
    TORN = "torn"


class WeightTransaction:
    """Owns the weight versions of a worker's models and whether they may serve.

    Args:
        parts: by the names selectors use, the target first; see `WeightParts`.
        passes_over: whether checkpoints hold a tensor of this name that no part has; like those of
            parts that are not selected, it is then ignored, and counted as that.
        ranks: the ranks that run the same models, each with its own slices of the tensors.
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
        self._lora_bases: dict[str, torch.Tensor] = {}  # adapted weights without their adapters
        self.is_resident = True  # False while the memory of the parts is given back
        self._clock = clock
        self._update: OpenUpdate | None = None
        self._torn: dict[str, str] = {}  # parts whose values are lost, and how they were
        self.expired = ""  # why the last update ended, if it was for silence
        self.num_bytes = 0  # that the last committed update wrote on this rank
        self.num_tensors: Counter[str] = Counter()  # of all updates, as `UpdateCounts.flat`
        self._warned = False  # that a frozen part ignores tensors

    @property
    def state(self) -> WeightState:
        if self._update is not None:
            return WeightState.LOADING if self._update.is_loading else WeightState.OPEN
        return WeightState.TORN if self._torn else WeightState.WHOLE

    @property
    def reason(self) -> str:
        """Why they do not serve."""
        if self.state is WeightState.LOADING:
            return "an update is under way"
        if not self._torn:
            return ""
        lost = "; ".join(dict.fromkeys(self._torn.values()))
        return f"{lost}; send an update that names every tensor of {', '.join(sorted(self._torn))}"

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
        return not self._torn and self.state is not WeightState.LOADING and self.is_resident

    @property
    def is_under_way(self) -> bool:
        """Whether an update is between begin and commit. Finds out on the way that a sender has
        gone silent."""
        self._abandon_if_silent()
        return self._update is not None

    @property
    def is_loading(self) -> bool:
        """Whether the update under way has written."""
        return self.is_under_way and self.state is WeightState.LOADING

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

    def begin(
        self,
        options: UpdateOptions,
        manifest: Manifest | None = None,
        source: WeightTensors | None = None,
    ) -> None:
        """Open an update.

        Args:
            manifest: all that is going to come; wrong names, shapes and dtypes are refused here.
            source: of an update that one `load` brings, what that will be given: all that is known
                of it is checked here, values too where its tensors are stored.

        Raises InvalidInputError, and WeightUpdateError while another update is under way, which
        goes on, or where this one would build on torn values that it does not replace, and
        EngineStateError while the weights are released; nothing has changed then, on any rank.
        """
        self._number += 1
        try:
            update = self._opened(options)
            if manifest is not None:
                update.announce(manifest)
            if source is not None:
                update.source = source
                update.check(source)
        except BaseException as error:
            self._post("begin", error)
            raise
        self._agree("begin")
        self._update, self.expired = update, ""

    def _opened(self, options: UpdateOptions) -> OpenUpdate:
        self.require_resident()
        self._abandon_if_silent()
        if self._update is not None:
            raise WeightUpdateError(
                f"an update to version {self._update.version} is under way; end or abandon it first"
            )
        parts = self.parts.selected(options.selector)
        require_base(self.versions, parts, options.base_version)
        built_on = parts if options.partial else frozenset()
        if self._torn and (self.parts.lenders(parts) | built_on) & self._torn.keys():
            raise WeightUpdateError(
                f"the weights are torn: {self.reason}; partial={options.partial} and "
                f"selector={options.selector!r} cannot heal them"
            )
        return OpenUpdate(
            options=options,
            versions=next_versions(self.versions, parts, options.weight_version),
            parts=parts,
            weight_loaders=self.parts.weight_loaders(parts),
            is_ignored=lambda name: self.parts.has(name) or self._passes_over(name),
            last_call=self._clock(),
            lora_bases=self._lora_bases,
        )

    @contextmanager
    def broadcast_failures(self, *, begins: bool = False) -> Iterator[None]:
        """A context for a call that begins an update or goes on with one: a failure before that is
        broadcast to all ranks.

        ``begins``: it can do nothing else, so an update under way goes on.
        """
        update, number = self._update, self._number
        num_loads = 0 if update is None else update.num_loads
        try:
            yield
        except BaseException as error:
            if self._number == number and update is None and self._update is None:
                self._number += 1
                self._post("begin", error)
            elif (
                not begins
                and self._ranks.size > 1  # the others take the call for one of the update
                and self._update is update is not None
                and update.num_loads == num_loads
            ):
                self.abandon(f"it failed: {error}")
            raise

    def load(self, source: WeightTensors) -> None:
        """Write tensors of the open update; called as often as they come.

        What is known of the source beforehand is checked before the first is written: values too
        where it is stored, the manifest where it has one; what streams is checked as it comes. Any
        failure ends the update, on all ranks. Raises InvalidInputError, and what the source raises.
        """
        update = self._under_way()
        try:
            if update.source is not source:
                update.check(source)
            update.load(source)
            update.is_loading |= update.restores_bases
            update.num_loads += 1
            if update.source is None:
                # What one rank has read may be gone for the others once this call returns.
                self._agree(f"load {update.num_loads}")
        except BaseException as error:
            self.abandon(f"it failed: {error}")
            raise
        update.last_call = self._clock()

    def renumber(self, weight_version: int) -> None:
        """Give the open update this version. Raises InvalidInputError for one that is in use."""
        update = self._under_way()
        update.versions = next_versions(self.versions, update.parts, weight_version)

    def commit(self) -> UpdateCounts:
        """End the open update: its version is the weights' from now on.

        Raises InvalidInputError where tensors did not come; the update has then failed.
        """
        update = self._under_way()
        try:
            update.check_complete()
            update.settle_bases()
            for part in sorted(update.parts):
                self.parts[part].finish_loading()
            self._agree("commit")
        except BaseException as error:
            self.abandon(f"it failed: {error}")
            raise
        self._update, self.num_bytes = None, update.num_bytes
        self._versions |= update.versions
        self._torn = {part: why for part, why in self._torn.items() if part not in update.parts}
        return self._counted(update)

    def _counted(self, update: OpenUpdate) -> UpdateCounts:
        """Count what became of a committed update's tensors, and say so."""
        counts = UpdateCounts(
            stored=self.parts.counts(update.loaded),
            ignored=self.parts.counts(update.ignored),
        )
        self.num_tensors.update(counts.flat)
        if self._ranks.rank:
            return counts  # rank 0 says it for all
        versions = ", ".join(f"{part} {version}" for part, version in update.versions.items())
        log.info("weight update to %s: %s", versions, counts)
        frozen = sorted(self.parts.frozen & counts.ignored.keys())
        if frozen and update.options.selector == "all" and not self._warned:
            self._warned = True
            log.warning(
                "a weight update brought tensors of frozen parts, which ignored them (%s): their "
                "drafts do not follow the trainer. With spec.frozen=false they do; "
                "selector='draft' updates them alone",
                ", ".join(f"{counts.ignored[part]} of {part}" for part in frozen),
            )
        return counts

    def abandon(self, reason: str) -> None:
        """Give the open update up, if there is one: torn if it had written, else as it was."""
        update, self._update = self._update, None
        if update is None:
            return
        if update.is_loading:
            self.tear(update.parts, f"an update to {update.progress}: {reason}")
        # These raise where ranks are lost.
        if update.source is None:  # where others may wait for this rank
            self._post(f"load {update.num_loads + 1}", reason)
        self._post("commit", reason)

    def tear(self, parts: Iterable[str], reason: str) -> None:
        """The values of these parts are lost: only a full update makes them serve again."""
        self._torn |= dict.fromkeys(parts, reason)

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

    def _under_way(self) -> OpenUpdate:
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
