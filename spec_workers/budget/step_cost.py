"""What a step costs: forward, sampling and drafting, learned together and kept per device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types import StepTimes
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.linear_cost import LinearCost


class StepCost:
    """Milliseconds of a step by running requests, query rows and longest context.

    The forward is a curve; sampling and acceptance grow with requests and sampled rows, drafting
    with requests and nodes proposed.
    """

    def __init__(self, device: str, curve: CostCurve) -> None:
        """``device``: whatever must be the same for times to compare, in words."""
        self.device = device
        self.curve = curve
        self._sampling = LinearCost(("step", "requests", "rows"))
        self._drafting = LinearCost(("step", "requests", "nodes"))
        self._following = LinearCost(("step", "requests"))
        self._elsewhere: dict[str, Any] = {}  # device -> what was learned there

    @property
    def is_known(self) -> bool:
        return self.curve.is_known

    def of_rows(
        self, width: int, rows: NDArray[np.int64], sampled: NDArray[np.int64], longest_context: int
    ) -> NDArray[np.float64]:
        """Forward and sampling of ``width`` sampling requests.

        ``sampled``: how many of each number of ``rows`` are sampled from.
        """
        per_row = self._sampling.slope("rows")
        fixed = self._sampling.milliseconds((1, width, 0))
        return self.curve.milliseconds(rows, longest_context) + (fixed + per_row * sampled)

    def of_decoding(self, width: int, longest_context: int) -> NDArray[np.float64]:
        """Plain decode steps of 1, 2, ..., ``width`` requests, without what drafting adds."""
        rows = np.arange(1, width + 1)
        per_request = self._sampling.slope("rows") + self._sampling.slope("requests")
        fixed = self._sampling.slope("step")
        times = self.curve.milliseconds(rows, longest_context) + fixed + per_request * rows
        return np.maximum.accumulate(times)

    def of_drafting(self, width: int, nodes: int) -> float:
        return self._drafting.milliseconds((1, width, nodes))

    def of_following(self, width: int) -> float:
        """Of a step in which nothing was proposed, only the tokens taken in."""
        return self._following.milliseconds((1, width))

    def observe(
        self,
        *,
        width: int,
        rows: int,
        longest_context: int,
        proposed: int | None,
        times: StepTimes,
        decode_only: bool,
        steps: int,
    ) -> None:
        """A step took so long, ``steps`` after the one observed before it.

        ``proposed``: nodes, None when nobody asked for any.

        Only steps without prefill tell of forward and sampling, for prefill rows have no logits.
        """
        if decode_only:
            self.curve.observe(rows, longest_context, times.forward, steps)
            self._sampling.observe((1, width, rows), times.sample)
        if proposed is None:
            self._following.observe((1, width), times.draft)
        else:
            self._drafting.observe((1, width, proposed), times.draft)

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
        kept = dict(learned.get("elsewhere", {}))
        if "cost" in learned:
            kept[str(learned.get("device"))] = {
                name: learned[name] for name in ("cost", "request_ms") if name in learned
            }
        here = kept.pop(self.device, None)
        if here is not None:
            self.curve.restore(here["cost"])
            parts = here.get("request_ms", {})
            for name, cost in (
                ("sampling", self._sampling),
                ("drafting", self._drafting),
                ("following", self._following),
            ):
                if name in parts:
                    cost.restore(parts[name])
        self._elsewhere = kept
