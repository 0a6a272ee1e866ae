"""A pytest plugin: where the suite's time goes.

    make test PYTEST_ARGUMENTS="-p tests.time_shares --durations=40"

Each test process measures itself: imports and collection, starts of engines, compilations of
Triton kernels, and waiting, which is wall time less the processor time of the process and of the
children that it reaped (on a busy machine it is also waiting for a core). What children start and
compile counts as processor time alone.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import psutil
import pytest

_KEY = "time_shares"
_TOTAL = "in all"


class TimeShares:
    """Seconds of one test process, by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._began = psutil.Process().create_time()

    def measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its outermost calls timed."""
        running = False

        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            nonlocal running
            if running:
                return function(*arguments, **options)
            running, started = True, time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                running = False
                self.seconds[name] += time.perf_counter() - started

        return timed

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        from triton import knobs

        from rollout import RolloutEngine

        self.seconds["imports and collection"] = time.time() - self._began
        initialize = self.measured("engine starts", RolloutEngine.__init__)
        RolloutEngine.__init__ = initialize  # type: ignore[method-assign]
        knobs.compilation.listener = self._compiled

    def _compiled(self, **compiled: Any) -> None:
        self.seconds["compilations"] += compiled["times"].total / 1e6

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        wall = time.time() - self._began
        self.seconds[_TOTAL] = wall
        self.seconds["waiting"] = max(0.0, wall - sum(u.ru_utime + u.ru_stime for u in used))
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_KEY] = dict(self.seconds)


class Summary:
    """The sum over all test processes, printed at the end."""

    def __init__(self, own: TimeShares) -> None:
        self._own = own
        self._workers: list[dict[str, float]] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._workers.append(getattr(node, "workeroutput", {}).get(_KEY, {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        processes = self._workers or [dict(self._own.seconds)]
        total: defaultdict[str, float] = defaultdict(float)
        for process in processes:
            for name, seconds in process.items():
                total[name] += seconds
        whole = total.pop(_TOTAL)
        terminalreporter.section(f"time of {len(processes)} test processes")
        for name, seconds in sorted(total.items(), key=lambda each: -each[1]):
            terminalreporter.line(f"{seconds:8.1f} s  {seconds / whole:6.1%}  {name}")
        terminalreporter.line(f"{whole:8.1f} s          in all")


def pytest_configure(config: pytest.Config) -> None:
    shares = TimeShares()
    config.pluginmanager.register(shares, "time-shares-of-process")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(shares), "time-shares-summary")
