"""The gate of drafting: closed while drafts do not pay, with a probe now and then."""

from __future__ import annotations

_MIN_GAIN = 0.04
"""The share of the time that drafts must gain by the estimates, which leave out cold caches and
scattered KV, so plain steps between drafting ones take up to 5 % longer than without any."""

_LIMIT = 2.0  # plain steps of a batch of one that drafts may lose; of more, less by the root
_CREDIT = 5.0  # limits that gains may make up for
_RECENT = 32  # steps after which a width that was left counts no more
_FIRST_INTERVAL = 32  # steps
_LAST_INTERVAL = 512  # steps, that fruitless probes double it to
_MAX_SHARE = 0.005  # of the time may be lost to probes, beside what drafts have gained
_MAX_LOSS = 2.0  # limits that one step counts for at most
_FIRST_BALANCE = 8.0  # plain steps of a batch of one that probes may lose at first; of more, less
_MAX_BALANCE = 10.0  # limits that they may lose after gains


class Gate:
    """Closes when the cumulative sum of what drafting gained falls below a limit (CUSUM, Page
    1954), and opens again to probe, after intervals that double while probes are fruitless. What
    drafts have gained before, probes may lose first: texts differ, and the next may pay.

    Batches of one octave of requests are judged by themselves: a group of rollouts ends narrow, and
    the next begins wide.
    """

    def __init__(self) -> None:
        self._by_octave: dict[int, _OctaveGate] = {}
        self._latest = self._before = _OctaveGate(1)  # octaves of the last steps
        self._steps = 0  # since the one before

    @property
    def is_open(self) -> bool:
        """Whether the step that was entered may draft."""
        return self._latest.closed_for == 0

    @property
    def may_draft(self) -> bool:
        """Whether the next step may draft, whose width is not known: that of the last steps'."""
        return self.is_open or (self._steps < _RECENT and self._before.closed_for == 0)

    def enter(self, width: int) -> None:
        """Begin a step of ``width`` sampling requests."""
        self._steps += 1
        entered = self._of(width)
        if entered is not self._latest:
            self._before, self._latest, self._steps = self._latest, entered, 0

    def observe(self, width: int, gained_ms: float, plain_ms: float) -> None:
        """Learn from a step of ``width`` sampling requests in which drafting was open.

        Args:
            gained_ms: what the same progress would have taken longer without, negative where
                drafting lost.
            plain_ms: the step without drafts.
        """
        self._of(width).observe(gained_ms / plain_ms)

    def skip(self, width: int) -> None:
        """Count a step of ``width`` sampling requests with the gate closed."""
        self._of(width).skip()

    def change_policy(self) -> None:
        """Probe again before long: drafts that did not pay may pay with other weights. With updates
        more frequent than probes, more than `_MAX_SHARE` can be lost."""
        for gate in self._by_octave.values():
            gate.closed_for = min(gate.closed_for, gate.interval // 4)

    def learned(self) -> dict[str, float | bool]:
        return {"open": self.is_open, "interval": self._latest.interval, "gain": self._latest.sum}

    def _of(self, width: int) -> _OctaveGate:
        octave = width.bit_length()
        if octave not in self._by_octave:
            self._by_octave[octave] = _OctaveGate(1 << max(0, octave - 1))
        return self._by_octave[octave]


class _OctaveGate:
    def __init__(self, width: int) -> None:
        """``width``: the octave's least."""
        self._limit = _LIMIT / width**0.5
        self.closed_for = 0  # steps until it opens; 0: open
        self.interval = _FIRST_INTERVAL  # when it closes next
        self.sum = 0.0  # plain steps gained since it opened
        self._balance = _FIRST_BALANCE / width  # plain steps that probes may lose

    def skip(self) -> None:
        if self.closed_for:
            self.closed_for -= 1
            self._add(_MAX_SHARE)

    def observe(self, gained: float) -> None:
        if self.closed_for:
            return  # the step was launched before the gate closed
        gained = max(gained, -_MAX_LOSS * self._limit)
        self.sum += gained - _MIN_GAIN
        self._add(gained - _MIN_GAIN)
        if self.sum >= _CREDIT * self._limit:
            self.sum, self.interval = _CREDIT * self._limit, _FIRST_INTERVAL
        if self.sum < -self._limit:
            self.closed_for = max(self.interval, int(-self._balance / _MAX_SHARE))
            if self._balance < self._limit:
                self.interval = min(2 * self.interval, _LAST_INTERVAL)
            self.sum = 0.0

    def _add(self, plain_steps: float) -> None:
        self._balance = min(self._balance + plain_steps, _MAX_BALANCE * self._limit)
