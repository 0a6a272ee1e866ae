"""Graphs of what a neural draft runs beside its target."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.config import MemoryConfig
from rollout.models.draft_model import DraftModel
from rollout.ops import gpu
from rollout.runner.graphs.capture import Capture, CudaCapture
from rollout.runner.graphs.graph_runner import GraphRunner
from rollout.runner.graphs.host_capture import host_capture, host_rows
from spec_workers.target import TargetWorker
from spec_workers.target.draft_sizing import draft_graph_bytes


@dataclass(frozen=True, slots=True)
class DraftGraphs:
    """The graphs of one draft, which share `draft_graph_bytes` and are dropped when memory is
    released. None: nothing of that kind is captured."""

    proposals: GraphRunner | None = None  # all levels of one together: their shapes are fixed
    max_trees: int = sys.maxsize  # of a proposal: wider ones gain nothing
    forwards: GraphRunner | None = None  # of one request: more have too many shapes

    @staticmethod
    def of(
        config: MemoryConfig, target: TargetWorker, networks: Sequence[DraftModel]
    ) -> DraftGraphs:
        """On a GPU, proposals; on a CPU, those of blocks alone, and forwards."""
        device, max_bytes = target.model.device, draft_graph_bytes(config)
        if not max_bytes or target.ranks.all.size > 1:
            return DraftGraphs()
        made: list[GraphRunner] = []

        def runner(name: str, capture: Capture) -> GraphRunner:
            found: GraphRunner = GraphRunner(
                name,
                max_bytes=lambda: (
                    max_bytes - sum(each.num_bytes for each in made if each is not found)
                ),
                capture=capture,
                device=device,
            )
            made.append(found)
            target.memory_saver.add_graphs(found)
            return found

        if device.type == "cuda":
            return DraftGraphs(proposals=runner("proposals", CudaCapture(device)))
        if gpu.runs_on(device) or any(each.spec.decoder.experts for each in networks):
            return DraftGraphs()  # what experts call depends on the rows they are sent
        linears = [each for network in networks for each in network.linears()]
        linears += target.model.linears()

        def on_host(name: str) -> GraphRunner | None:
            capture = host_capture(linears)  # one for each function
            return None if capture is None else runner(name, capture)

        forwards = on_host("draft forwards")
        if networks[0].spec.block_size == 1:
            return DraftGraphs(forwards=forwards)
        return DraftGraphs(
            proposals=on_host("proposals"),
            max_trees=host_rows(linears) // networks[0].spec.block_size,
            forwards=forwards,
        )
