"""Whether a draft's proposals are captured."""

from __future__ import annotations

from rollout.config import MemoryConfig
from rollout.runner.graphs.capture import CudaCapture
from rollout.runner.graphs.captured_runs import CapturedRuns
from spec_workers.target import TargetWorker


def proposal_graphs(config: MemoryConfig, target: TargetWorker) -> CapturedRuns | None:
    """None where nothing is to be captured. The target's graphs have what they need of the bound,
    drafts what that leaves. When memory is given back theirs go too."""
    device = target.model.device
    if device.type != "cuda" or not config.graph_bytes or target.ranks.all.size > 1:
        return None
    forwards = None if target.graphs is None else target.graphs.runs
    graphs = CapturedRuns(
        "proposals",
        max_bytes=lambda: config.graph_bytes - (0 if forwards is None else forwards.num_bytes),
        capture=CudaCapture(device),
        device=device,
    )
    target.residency.add_graphs(graphs)
    return graphs
