"""What a step costs: forward, sampling and drafting, learned together and kept per device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types import StepTimes
from spec_workers.budget.cost_curve import CostCurve, checked_curve
from spec_workers.budget.linear_cost import LinearCost
from spec_workers.budget.loaded import mapping

_MAX_DEVICES = 64  # whose costs are kept for runs there, the latest learned of


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
        found = dict(mapping(learned, "elsewhere")) if "elsewhere" in learned else {}
        if "cost" in learned:
            device = learned.get("device")
            if not isinstance(device, str):
                raise ValueError("device: must be text")
            found[device] = learned
        kept = {device: _checked(mapping(found, device)) for device in found}
        here = kept.pop(self.device, None)
        if here is not None:
            self.curve.restore(here["cost"])
            parts = here["request_ms"]
            self._sampling.restore(parts["sampling"])
            self._drafting.restore(parts["drafting"])
            self._following.restore(parts["following"])
        self._elsewhere |= kept
        for device in list(self._elsewhere)[:-_MAX_DEVICES]:
            del self._elsewhere[device]


def _checked(learned: Mapping[str, Any]) -> dict[str, Any]:
    """The costs of one device alone, without other fields. Raises ValueError."""
    curve, parts = mapping(learned, "cost"), mapping(learned, "request_ms")
    checked_curve(curve)
    names = ("sampling", "drafting", "following")
    for name in names:
        LinearCost().restore(mapping(parts, name))
    return {
        "cost": {
            name: curve[name] for name in ("rows", "contexts", "milliseconds", "observations")
        },
        "request_ms": {name: parts[name] for name in names},
    }
