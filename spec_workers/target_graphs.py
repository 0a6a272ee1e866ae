"""Whether the target's forwards are captured, and for which numbers of rows."""

from __future__ import annotations

from rollout.config import MemoryConfig
from rollout.models.causal_lm import CausalLM
from rollout.runner.graphs import Buckets, ForwardGraphs
from rollout.runner.graphs.capture import Capture, CudaCapture


def forward_graphs(
    config: MemoryConfig, model: CausalLM, minimum_rows: int, capture: Capture | None = None
) -> ForwardGraphs | None:
    """None where nothing is to be captured. What layers launch depends on the shapes of a bucket
    alone, also in recurrent ones and in sparse ones, wherever their rows go.

    ``capture``: how; default: as CUDA graphs on a GPU, else not at all.
    """
    spec, device = model.spec, model.device
    if capture is None and device.type == "cuda":
        capture = CudaCapture(device)
    if capture is None or not config.graph_bytes:
        return None
    buckets = Buckets(
        max_rows=config.graph_rows,
        max_context_len=spec.max_context_len,
        minimum_rows=minimum_rows,
    )
    return ForwardGraphs(buckets, max_bytes=config.graph_bytes, capture=capture, device=device)
