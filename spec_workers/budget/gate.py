"""The gate of drafting: closed while drafts have not paid, with a probe now and then."""

from __future__ import annotations

import math
from copy import copy

_HORIZON = 48.0  # steps that weigh in what was gained
_MIN_STEPS = 24  # drafted before they are judged
_FEWEST_STEPS = 6  # where it is beyond doubt
_DOUBT = 2.0  # standard deviations of the sum
_PROBE_STEPS = 4  # drafted at each look
_FIRST_INTERVAL = 16  # steps
_LONGEST_INTERVAL = 512  # where nothing pays, 1 to 2 % of the steps are drafted
_LONGEST_FIRST_INTERVAL = 128
"""Steps until the first probe after a change of weights, at most. Trainers change them every few
dozen steps: where probes of one policy after the other are fruitless, they come more seldom."""
_TEMPERATURE_STEP = 0.25  # batches whose mean temperatures differ by more are of two kinds
_MIN_GAIN = 0.02
"""The share of the time that drafts must gain by the estimates, which leave out cold caches, wider
sampling, and that requests which end early may only wait for the slowest."""


class Gate:
    """Opens and closes by what drafting gained, as a share of the time spent.

    While it is closed, a few steps are drafted again every so often; fruitless probes double the
    interval. Batches of one octave of requests and of one temperature are a kind, and each kind is
    judged by itself. A kind that comes up while another is closed is probed at once; one that comes
    back goes on from where it was.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _KindGate] = {}
        self._latest = _KindGate()  # of the last batch that was observed or skipped

    @property
    def is_open(self) -> bool:
        """Whether the next step may draft."""
        return self._latest.is_open

    def observe(
        self, width: int, gained_ms: float, spent_ms: float, temperature: float = 1.0
    ) -> None:
        """Learn from a step of ``width`` sampling requests in which drafting was open.

        ``gained_ms``: what the same progress would have taken longer without, negative where
        drafting lost. ``spent_ms``: of the step without drafts.
        ``temperature``: mean of the requests.
        """
        self._of(width, temperature).observe(gained_ms, spent_ms)

    def skip(self, width: int, temperature: float = 1.0) -> None:
        """Count a step of ``width`` sampling requests with the gate closed."""
        self._of(width, temperature).skip()

    def change_policy(self) -> None:
        """Probe again before long: drafts that did not pay may pay with other weights."""
        for gate in self._kinds.values():
            gate.change_policy()

    def learned(self) -> dict[str, float | bool]:
        """The latest kind's state, for people to look at."""
        return self._latest.learned()

    def _of(self, width: int, temperature: float) -> _KindGate:
        kind = width.bit_length(), round(temperature / _TEMPERATURE_STEP)
        if kind not in self._kinds:
            self._kinds[kind] = self._latest.for_another_kind() if self._kinds else self._latest
        self._latest = self._kinds[kind]
        return self._latest


class _KindGate:
    """The gate of one kind of batch."""

    def __init__(self, *, probing: bool = False) -> None:
        self._probing = probing
        self._closed_for = 0  # steps until the next probe; 0: open
        self._interval = _FIRST_INTERVAL
        self._first_interval = _FIRST_INTERVAL  # after a change of policy
        self._policy_is_new = False  # not probed yet
        self._steps = 0
        self._gained = self._squares = self._spent = 0.0

    def for_another_kind(self) -> _KindGate:
        """The gate with which another kind begins that follows this one."""
        return copy(self) if self.is_open else _KindGate(probing=True)

    @property
    def is_open(self) -> bool:
        return self._closed_for == 0

    def observe(self, gained_ms: float, spent_ms: float) -> None:
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
                self._judge_probe()
        elif self._excess < 0 and self._is_certain:
            self._interval = self._closed_for = _FIRST_INTERVAL
            self._policy_is_new = False

    def skip(self) -> None:
        if self.is_open:
            return  # it was launched while another kind's gate was closed
        self._closed_for -= 1
        if self._closed_for == 0:
            self._probing = True
            self._forget()

    def change_policy(self) -> None:
        self._policy_is_new = True
        self._interval = self._first_interval
        self._closed_for = min(self._closed_for, self._first_interval)

    def learned(self) -> dict[str, float | bool]:
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
        return self._gained - _MIN_GAIN * self._spent

    def _judge_probe(self) -> None:
        self._probing = False
        if self._excess > 0:
            self._interval = self._first_interval = _FIRST_INTERVAL
            self._forget()
        else:
            self._interval = self._closed_for = min(2 * self._interval, _LONGEST_INTERVAL)
            if self._policy_is_new:
                self._first_interval = min(2 * self._first_interval, _LONGEST_FIRST_INTERVAL)
        self._policy_is_new = False

    def _forget(self) -> None:
        self._steps = 0
        self._gained = self._squares = self._spent = 0.0
