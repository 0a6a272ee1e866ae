"""The gate of drafting: closed while drafts have not paid, with a probe now and then."""

from __future__ import annotations

import math

_HORIZON = 48.0  # steps that weigh in what was gained
_MIN_STEPS = 24  # drafted before they are judged
_FEWEST_STEPS = 6  # where it is beyond doubt
_DOUBT = 2.0  # standard deviations of the sum
_PROBE_STEPS = 4  # drafted at each look
_FIRST_INTERVAL = 16  # steps
_LONGEST_INTERVAL = 512  # where nothing pays, 1 to 2 % of the steps are drafted
_OTHER_TEMPERATURE = 0.2  # difference of mean temperatures that makes another kind of batch
_PAYS = 0.02
"""The share of the time that drafts must gain by the estimates, which leave out cold caches, wider
sampling, and that requests which end early may only wait for the slowest."""


class Gate:
    """Opens and closes by what drafting gained, as a share of the time spent.

    While it is closed every so often a few steps are drafted again; fruitless probes double the
    interval. A batch of half the width or of another temperature is another matter: it is probed
    at once.
    """

    def __init__(self) -> None:
        self._probing = False
        self._closed_for = 0  # steps until the next probe; 0: open
        self._interval = _FIRST_INTERVAL
        self._closed_at = 0  # requests of the batch when it closed
        self._closed_temperature = 0.0
        self._steps = 0
        self._gained = self._squares = self._spent = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the next step may draft."""
        return self._closed_for == 0

    def observe(
        self, width: int, gained_ms: float, spent_ms: float, temperature: float = 1.0
    ) -> None:
        """Learn from a step of ``width`` sampling requests in which drafting was open.

        ``gained_ms``: what the same progress would have taken longer without, negative where
        drafting lost. ``spent_ms``: of the step without drafts.
        ``temperature``: mean of the requests.
        """
        if not self.is_open:
            return  # it was launched before the gate closed, and would close it anew
        self._steps += 1
        if self._probing and self._steps == 1:
            return  # its drafting caught up with all that was emitted meanwhile
        decay = 1.0 - 1.0 / _HORIZON
        self._gained = self._gained * decay + gained_ms
        self._squares = self._squares * decay**2 + gained_ms**2
        self._spent = self._spent * decay + spent_ms
        if self._probing:
            if self._steps > _PROBE_STEPS:
                self._judge_probe(width, temperature)
        elif self._excess < 0 and self._is_certain:
            self._interval = _FIRST_INTERVAL
            self._close(width, temperature)

    def skip(self, width: int, temperature: float = 1.0) -> None:
        """Count a step of ``width`` sampling requests with the gate closed."""
        self._closed_for -= 1
        is_other = abs(temperature - self._closed_temperature) > _OTHER_TEMPERATURE
        if 2 * width <= self._closed_at or is_other:
            self._interval = _FIRST_INTERVAL
            self._closed_for = 0
        if self._closed_for == 0:
            self._probing = True
            self._forget()

    def change_policy(self) -> None:
        """Probe again before long: with other weights, often in another epoch, drafts may pay that
        did not."""
        self._interval = _FIRST_INTERVAL
        self._closed_for = min(self._closed_for, _FIRST_INTERVAL)

    def learned(self) -> dict[str, float | bool]:
        """The gate's state, for people to look at."""
        return {
            "open": self.is_open,
            "probing": self._probing,
            "interval": self._interval,
            "gain": self._gained / self._spent if self._spent else 0.0,
        }

    @property
    def _is_certain(self) -> bool:
        """Whether a loss is to be believed: of many steps, or of a few that agree."""
        if self._steps < _FEWEST_STEPS:
            return False
        return self._steps >= _MIN_STEPS or self._excess < -_DOUBT * math.sqrt(self._squares)

    @property
    def _excess(self) -> float:
        """Milliseconds gained beyond what it takes to draft on."""
        return self._gained - _PAYS * self._spent

    def _judge_probe(self, width: int, temperature: float) -> None:
        self._probing = False
        if self._excess > 0:
            self._interval = _FIRST_INTERVAL
            self._forget()
        else:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
            self._close(width, temperature)

    def _close(self, width: int, temperature: float) -> None:
        self._closed_for = self._interval
        self._closed_at = width
        self._closed_temperature = temperature

    def _forget(self) -> None:
        self._steps = 0
        self._gained = self._squares = self._spent = 0.0
