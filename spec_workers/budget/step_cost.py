"""What a step costs: forward, sampling and drafting, learned together and kept per device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types import StepTimes
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.linear_cost import LinearCost
from spec_workers.budget.loaded import mapping


class StepCost:
    """Milliseconds of a step by running requests, query rows and longest context.

    The forward is a curve; sampling and acceptance grow with the rows sampled from, drafting and
    taking in what was emitted with the requests.
    """

    def __init__(self, device: str, curve: CostCurve) -> None:
        """``device``: whatever must be the same for times to compare, in words."""
        self.device = device
        self.curve = curve
        self._sampling = LinearCost()  # by rows sampled from
        self._drafting = LinearCost()  # by requests
        self._following = LinearCost()  # likewise, where nothing is proposed
        self._elsewhere: dict[str, Any] = {}  # device -> what was learned there

    @property
    def is_known(self) -> bool:
        return self.curve.is_known

    def of_rows(
        self, rows: NDArray[np.int64], sampled: NDArray[np.int64], longest_context: int
    ) -> NDArray[np.float64]:
        """Forward and sampling.

        ``sampled``: how many of each number of ``rows`` are sampled from, ascending.
        """
        sampling = self._sampling.milliseconds(float(sampled[0]))
        more = self._sampling.each * (sampled - sampled[0])
        return self.curve.milliseconds(rows, longest_context) + (sampling + more)

    def of_decoding(self, width: int, longest_context: int) -> NDArray[np.float64]:
        """Plain decode steps of 1, 2, ..., ``width`` requests, without what drafting adds."""
        rows = np.arange(1, width + 1)
        return np.maximum.accumulate(self.of_rows(rows, rows, longest_context))

    def of_drafting(self, width: int) -> float:
        return self._drafting.milliseconds(width)

    def of_following(self, width: int) -> float:
        """Of a step in which nothing was proposed, only the tokens taken in."""
        return self._following.milliseconds(width)

    def observe(
        self,
        *,
        width: int,
        rows: int,
        longest_context: int,
        proposed: bool,
        times: StepTimes,
        decode_only: bool,
        steps: int,
    ) -> None:
        """A step took so long, ``steps`` after the one observed before it.

        ``proposed``: whether draft nodes were asked for. ``times``: NaN where one that comes again
        is not known.

        Only steps without prefill tell anything: prefill rows have no logits, and neural drafts
        read each of them.
        """
        if not decode_only:
            return
        self.curve.observe(rows, longest_context, times.forward, steps)
        self._sampling.observe(rows, times.sample)
        if not math.isnan(times.draft):
            (self._drafting if proposed else self._following).observe(width, times.draft)

    def learned(self) -> dict[str, Any]:
        """JSON-able, for `restore` and for people to look at."""
        here = {
            "cost": self.curve.learned(),
            "request_ms": {
                "sampling": self._sampling.learned(),
                "drafting": self._drafting.learned(),
                "following": self._following.learned(),
            },
        }
        return {"device": self.device, **here, "elsewhere": self._elsewhere}

    def restore(self, learned: Mapping[str, Any]) -> None:
        """Go on from an earlier run on this device. Raises ValueError for what cannot be one's."""
        kept = dict(mapping(learned, "elsewhere")) if "elsewhere" in learned else {}
        if "cost" in learned:
            kept[str(learned.get("device"))] = {
                name: learned[name] for name in ("cost", "request_ms") if name in learned
            }
        if self.device in kept:
            here = mapping(kept, self.device)
            del kept[self.device]
            self.curve.restore(mapping(here, "cost"))
            parts = mapping(here, "request_ms")
            self._sampling.restore(mapping(parts, "sampling"))
            self._drafting.restore(mapping(parts, "drafting"))
            self._following.restore(mapping(parts, "following"))
        self._elsewhere |= kept
