"""Runs of fixed shapes: captured when they come, kept within a bound, let go of together."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch

from rollout.ops.transfers import DeviceBuffer
from rollout.parallel import RankGroup, SingleRank
from rollout.runner.graphs.capture import Capture, Captured, GraphTooLargeError, Tensors

log = logging.getLogger(__name__)

_INPUT_BYTES = 1 << 20


class _Outcome(enum.IntEnum):
    """The outcomes of a capture. Ranks take the largest of theirs."""

    CAPTURED = 0
    TOO_LARGE = 1
    NO_MEMORY = 2
    FAILED = 3


class GraphRunner:
    """Captures runs and replays them. Callers place a run's inputs here and run it through here.

    A graph reads and writes fixed addresses: inputs in one buffer, weights and KV where they are.
    Updates of weights write in place, so graphs stay valid; memory that is given back and taken
    again may lie elsewhere, so then all graphs go (`drop`).

    Graphs that share memory give it back only all together. A run whose graph fits neither beside
    the others nor in their room is not captured until all of them go. Should they outgrow their
    bound all the same, all are dropped, and a run is captured again after twice as many uses. Where
    each graph has memory of its own, a run whose graph does not fit is not captured.

    Ranks that make the same runs capture alike: all have a graph of a run, or none has. A run that
    is captured computes its results once, as any other run does, so ranks make equally many
    collectives.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bytes: Callable[[], int],
        capture: Capture,
        device: torch.device,
        input_bytes: int = _INPUT_BYTES,
        on_drop: Callable[[], None] = lambda: None,
        ranks: RankGroup | None = None,
    ) -> None:
        """
        Args:
            name: of what is run, for the log.
            max_bytes: that graphs may hold now: others may share the bound.
            input_bytes: most that one run's inputs take.
            on_drop: called when all graphs go, for what outlives a single one.
            ranks: that make the same runs; default: this one alone.
        """
        self._name = name
        self._max_bytes = max_bytes
        self._capture = capture
        self._device = device
        self._on_drop = on_drop
        self._ranks = ranks or SingleRank()
        self._inputs = DeviceBuffer(input_bytes, device)
        self._graphs: dict[Hashable, Captured] = {}
        self.num_bytes = 0  # device memory they hold
        self._uses: Counter[Hashable] = Counter()
        self._uses_wanted = 1  # of a key until it is captured
        self._too_large: set[Hashable] = set()  # not captured until all graphs go
        self.is_paused = False  # their memory is wanted elsewhere
        self.failure = ""  # why nothing is captured any more
        self.is_warm = True  # the last run neither came under a new key nor was captured

    @property
    def is_idle(self) -> bool:
        """Whether nothing is captured now, and no inputs are taken."""
        return self.is_paused or bool(self.failure)

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    def send(self, record: Any) -> Any:
        """Send a run's inputs to the buffer that graphs read; None while nothing is captured.

        Arrays whose shapes the key does not fix come last in the record.
        """
        return None if self.is_idle else self._inputs.send(record)

    def run(
        self,
        key: Hashable,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors] | None = None,
    ) -> Tensors:
        """Run ``function``, or replay its graph. The results are valid until the next run.

        Under one key the function may read only the sent inputs, and tensors whose address never
        changes. ``make_outputs``: makes the tensors that a graph writes its results to; default:
        new ones.
        """
        if self.num_bytes > self._max_bytes():
            self._outgrown()
        self._uses[key] += 1
        self.is_warm = self._uses[key] > 1
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif self._uses[key] >= self._uses_wanted and key not in self._too_large:
            self.is_warm = False
            graph = self._captured(key, function, make_outputs or _like)
        return function() if graph is None else graph.results

    def drop(self) -> int:
        """Release every graph; returns the bytes freed. What comes again is captured again."""
        freed = self.num_bytes
        if self._graphs:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # none is running
            self._graphs.clear()
            self.num_bytes = 0
            self._capture.reset()
        self._on_drop()
        self._too_large.clear()
        return freed

    def _forget(self) -> None:
        """Let go of every graph, and of how often each run came."""
        self.drop()
        self._uses.clear()

    def _captured(
        self,
        key: Hashable,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors],
    ) -> Captured | None:
        graph, num_bytes, failure = None, 0, ""
        try:
            graph = self._capture(function, make_outputs, self._room())
            outcome, num_bytes = _Outcome.CAPTURED, graph.num_bytes
        except torch.OutOfMemoryError:
            outcome = _Outcome.NO_MEMORY
        except GraphTooLargeError as error:
            outcome, num_bytes = _Outcome.TOO_LARGE, error.num_bytes
        except RuntimeError as error:
            outcome, failure = _Outcome.FAILED, str(error)
        outcome = _Outcome(max(self._ranks.all_gather_int(outcome)))
        num_bytes = max(self._ranks.all_gather_int(num_bytes))
        if outcome is _Outcome.CAPTURED and graph is not None:
            self._keep(key, graph, num_bytes)
            return graph
        del graph  # of a rank that could, where another one could not
        if outcome is _Outcome.NO_MEMORY:
            self._outgrown()
        elif outcome is _Outcome.TOO_LARGE:
            self._too_large.add(key)
            log.info(
                "a graph of %s of %s would take %d MiB, and memory.graph_bytes leaves room for %d: "
                "it is not captured",
                self._name, key, num_bytes >> 20, self._room() >> 20,
            )  # fmt: skip
        else:
            reason = failure or "another rank could not"
            self.failure = f"capturing {self._name} of {key} failed: {reason}"
            log.warning("%s; they run without graphs from now on, and slower", self.failure)
            self._forget()
        return None

    def _keep(self, key: Hashable, graph: Captured, num_bytes: int) -> None:
        self._graphs[key] = graph
        self.num_bytes += num_bytes
        if num_bytes > self._max_bytes():
            self._forget()
            self._too_large.add(key)
        elif self.num_bytes > self._max_bytes():
            self._outgrown()

    def _room(self) -> int:
        """Bytes that one more graph may want: no two run at once, so each may use what others
        have."""
        left = self._max_bytes() - self.num_bytes
        return max(left, self.num_bytes) if self._capture.shares_memory else left

    def _outgrown(self) -> None:
        """Drop all graphs: they hold more than they may, or there was no memory for one more."""
        self._uses_wanted *= 2
        log.info(
            "%d graphs of %s hold %d MiB, %d are left of memory.graph_bytes: dropped; from "
            "now on one is captured only when it has come %d times",
            self.num_graphs,
            self._name,
            self.num_bytes >> 20,
            self._max_bytes() >> 20,
            self._uses_wanted,
        )
        self._forget()


def _like(results: Tensors) -> Tensors:
    return {name: torch.empty_like(tensor) for name, tensor in results.items()}
