"""The protocol of a neural drafter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.types import Batch, DraftTrees, Request
from spec_workers.observation import Observation


class Drafter(Protocol):
    """Proposes trees, and reads what the target computed of what was verified."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the values of its trees' ``sources_N``."""
        ...

    @property
    def features(self) -> AuxHiddenStates:
        """The hidden states of the target that it reads."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Nodes of one request's tree, the root excluded."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether every `propose` and `observe` enters the same forwards, whatever there is to run:
        other ranks wait in them."""
        ...

    @property
    def is_warm(self) -> bool:
        """Whether the timing of the last `propose` is steady-state: on a GPU the first ones of a
        shape compile kernels and capture graphs."""
        ...

    def propose(
        self, batch: Batch, floor: float, entries: Collection[int] | None = None
    ) -> DraftTrees:
        """Each entry's most probable nodes first, none less probable than ``floor``.

        ``entries``: of the batch, those for which trees are wanted; default: all that sample.
        """
        ...

    def observe(self, step: Observation, *, prompts_alone: bool = False) -> None:
        """Draft-extend: run the positions the target computed in this step.

        What is not run leaves holes: positions the draft does not attend to. ``prompts_alone``:
        leave what was decoded. A prompt is never run again once it is cached, so a draft that is
        to be of use later must read it now.
        """
        ...

    def release(self, request: Request) -> None:
        """The request ended."""
        ...

    def weights_changed(self) -> None:
        """The target's or the draft's: nothing computed with the old ones is read again."""
        ...

    def counters(self) -> dict[str, float]:
        """Gauges, for metrics."""
        ...
