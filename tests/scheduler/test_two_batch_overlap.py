"""When halves take turns: measured on machines of known speed."""

from __future__ import annotations

import itertools

import pytest

from rollout.config import Overlap, SchedulerConfig
from rollout.errors import InvalidInputError
from rollout.scheduler import TwoBatchOverlap
from rollout.types import StepTimes


class Machine:
    """A device and a host that take so long for so many requests, milliseconds."""

    def __init__(self, device, host, overlap: Overlap = Overlap.auto, hides: bool = True) -> None:
        self.device, self.host = device, host
        self.halving = TwoBatchOverlap(overlap, hides=hides)
        self.milliseconds = 0.0

    def step(self, running: int) -> bool:
        """Everyone decodes one token; whether in halves."""
        halved = self.halving.wants(running)
        count = running // 2 if halved else running
        device, host = self.device(count), self.host(count)
        for _ in range(1 + halved):
            total = max(device, host) if halved else device + host
            times = StepTimes(forward=device, waited=max(0.0, total - host), total=total)
            self.halving.observe(running, halved, count, times)
            self.milliseconds += total
        return halved

    def halved_share(self, running: int, steps: int) -> float:
        return sum(self.step(running) for _ in range(steps)) / steps


def test_a_device_bound_by_arithmetic_and_a_busy_host_take_turns() -> None:
    machine = Machine(lambda n: 0.05 * n, lambda n: 0.04 * n)
    assert machine.halved_share(256, 100) > 0.8
    assert machine.halved_share(256, 3000) > 0.97
    assert machine.milliseconds < 0.65 * 3100 * 256 * 0.09


def test_a_device_that_reads_its_weights_twice_is_tried_and_left_alone() -> None:
    """Whole steps take 13 ms, two halves 19: a try now and then must cost little."""
    machine = Machine(lambda n: 9.0 + 0.004 * n, lambda n: 0.012 * n)
    steps = 5000
    machine.halved_share(256, steps)
    whole = 9.0 + 0.016 * 256
    assert machine.milliseconds < 1.01 * steps * whole


def test_where_one_of_them_does_everything_halves_are_not_even_tried() -> None:
    for device, host in ((10.0, 0.3), (0.3, 10.0)):
        machine = Machine(lambda n, ms=device: ms, lambda n, ms=host: ms)
        assert machine.halved_share(64, 2000) == 0.0


def test_what_was_measured_does_not_count_for_ever() -> None:
    """The host has less to do, then more, than the device with its weights."""
    each = 0.01
    machine = Machine(lambda n: 9.0 + 0.02 * n, lambda n: each * n)
    assert machine.halved_share(256, 500) < 0.1
    each = 0.05
    machine.halved_share(256, 1200)
    assert machine.halved_share(256, 500) > 0.9
    each = 0.01
    machine.halved_share(256, 1200)
    assert machine.halved_share(256, 500) < 0.1


def test_steps_that_compile_do_not_decide() -> None:
    steps = itertools.count()
    machine = Machine(lambda n: 0.05 * n + 500.0 * (next(steps) % 5 == 4), lambda n: 0.04 * n)
    machine.halved_share(256, 50)
    assert machine.halved_share(256, 200) == 1.0


def test_sizes_are_judged_by_themselves() -> None:
    machine = Machine(lambda n: 4.0 + 0.05 * n, lambda n: 0.05 * n)
    assert machine.halved_share(512, 200) > 0.8
    assert machine.halved_share(16, 200) < 0.1
    assert machine.halved_share(512, 50) == 1.0


def test_what_is_configured() -> None:
    def free(n: int) -> float:
        return 0.05 * n

    assert Machine(free, free, Overlap.never).halved_share(256, 200) == 0.0
    assert Machine(free, free, hides=False).halved_share(256, 200) == 0.0
    always = Machine(free, free, Overlap.always, hides=False)
    assert always.halved_share(2, 10) == 1.0
    assert always.halved_share(1, 10) == 0.0
    assert SchedulerConfig(overlap="always").overlap is Overlap.always
    with pytest.raises(
        InvalidInputError, match=r"scheduler.overlap=True: must be one of auto, always"
    ):
        SchedulerConfig(overlap=True)


def test_halves_that_are_never_judged_are_given_up() -> None:
    """A server of which every step has a prompt in it."""
    machine = Machine(lambda n: 9.0 + 0.004 * n, lambda n: 0.012 * n)
    for _ in range(12):
        times = StepTimes(forward=10.0, waited=6.0, total=13.0)
        machine.halving.observe(256, False, 256, times)
    halved = sum(machine.halving.wants(256) for _ in range(900))
    assert 0 < halved < 60
