"""Captured forwards: made when a shape comes back, kept within a bound, let go of together.

Legend: T query rows, E hidden, F feature columns, C routes of a row.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from numpy.typing import NDArray

from rollout.graphs.buckets import Bucket, Buckets
from rollout.graphs.capture import Capture, Captured
from rollout.step_arrays import StepArrays
from rollout.transfers import DeviceBuffer

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a forward: hidden states [T, E], features [T, F], routes [T, C]."""

Forward = Callable[[Tensors, int], Results]
"""From `StepArrays.inputs` and the longest run."""

_OTHER_INPUTS = 1 << 20
"""Bytes of a step's other inputs: changes of req_to_token and the rows of the head."""

_FIRST_USES = 2  # of a shape until it is captured: one that comes once is not worth it


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A step whose inputs are where graphs read them."""

    tensors: Tensors  # padded
    bucket: Bucket
    variant: Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    captured: Captured
    results: Results


class ForwardGraphs:
    """Whoever runs a forward places its inputs here and runs it through here.

    A graph reads and writes fixed addresses: inputs in one buffer, weights and KV where they are.
    Updates of weights write in place, so graphs stay valid; memory that is given back and taken
    again may lie elsewhere, so then all graphs go (`drop`).

    A shared pool's memory comes back only as a whole. So when graphs outgrow ``max_bytes``, all
    are dropped, and what still comes up is captured again, each time after twice as many uses.
    """

    def __init__(
        self, buckets: Buckets, *, max_bytes: int, capture: Capture, device: torch.device
    ) -> None:
        self.buckets = buckets
        self._max_bytes = max_bytes
        self._capture = capture
        self._device = device
        size = buckets.input_bytes + _OTHER_INPUTS
        self._inputs = DeviceBuffer(size, device)
        self._graphs: dict[tuple[Bucket, Hashable], _Graph] = {}
        self._kept: dict[Hashable, list[torch.Tensor]] = {}
        self._uses: Counter[tuple[Bucket, Hashable]] = Counter()
        self._uses_wanted = _FIRST_USES
        self.is_paused = False  # their memory is wanted elsewhere: steps go without
        self.failure = ""  # why nothing is captured any more
        self.is_settled = True  # the last forward neither came in a new shape nor was captured

    @property
    def num_bytes(self) -> int:
        """Device memory the graphs hold."""
        return sum(graph.captured.num_bytes for graph in self._graphs.values())

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def place(
        self, step: StepArrays, others: dict[str, NDArray], variant: Hashable
    ) -> Placed | None:
        """Send a step's inputs, padded, and ``others`` behind them; None where it goes without.

        ``variant``: what a forward depends on beside its inputs' shapes.
        """
        self.is_settled = True
        bucket = None if self.is_paused or self.failure else self.buckets.bucket(step)
        if bucket is None:
            return None
        padded = step.padded(rows=bucket.rows, entries=bucket.entries, nodes=bucket.nodes)
        arrays = padded.inputs() | others
        tensors = self._inputs.send(arrays)
        if tensors is None:
            self.is_settled = False
            return None
        return Placed(tensors=tensors, bucket=bucket, variant=variant)

    def run(self, placed: Placed, forward: Forward) -> Results:
        """Of the padded step, valid until the next one."""
        key = (placed.bucket, placed.variant)
        self._uses[key] += 1
        graph = self._graphs.get(key)
        self.is_settled = self._uses[key] > 1
        if graph is None and self._uses[key] >= self._uses_wanted:
            self.is_settled = False
            graph = self._captured(placed, forward)
        if graph is None:
            return forward(placed.tensors, placed.bucket.longest)
        graph.captured.replay()
        return graph.results

    def drop(self) -> int:
        """Let go of every graph; the bytes that come back. What comes up is captured anew."""
        freed = self.num_bytes
        if self._graphs:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # none is running
            self._graphs.clear()
            self._kept.clear()
            self._capture.reset()
        self._uses.clear()
        return freed

    def _captured(self, placed: Placed, forward: Forward) -> _Graph | None:
        tensors, longest = placed.tensors, placed.bucket.longest
        results = self._results(placed.variant, forward(tensors, longest))

        def run() -> None:
            for kept, each in zip(results, forward(tensors, longest), strict=True):
                kept.copy_(each)

        try:
            captured = self._capture(run)
            graph = _Graph(captured=captured, results=results)
        except torch.OutOfMemoryError:
            self._outgrown()
            return None
        except RuntimeError as error:
            self.failure = f"capturing a CUDA graph of {placed.bucket} failed: {error}"
            log.warning("%s; steps run without graphs from now on, and slower", self.failure)
            self.drop()
            return None
        self._graphs[placed.bucket, placed.variant] = graph
        if self.num_bytes > self._max_bytes:
            self._outgrown()
        return graph

    def _outgrown(self) -> None:
        """They hold more than they may, or there was no memory for one more."""
        self._uses_wanted *= 2
        log.info(
            "%d CUDA graphs hold %d MiB, memory.graph_bytes allows %d: dropped; from now on a "
            "shape is captured when it comes for the %dth time",
            self.num_graphs,
            self.num_bytes >> 20,
            self._max_bytes >> 20,
            self._uses_wanted,
        )
        self.drop()

    def _results(self, variant: Hashable, like: Results) -> Results:
        """Where all graphs of a variant leave what they compute; ``like``: such results."""
        if variant not in self._kept:
            most = self.buckets.rows[-1]
            self._kept[variant] = [each.new_empty((most, each.shape[1])) for each in like]
        hidden_TE, features_TF, routes_TC = (
            kept[: len(each)] for kept, each in zip(self._kept[variant], like, strict=True)
        )
        return hidden_TE, features_TF, routes_TC
