"""Whether the target's forwards are captured, and for which numbers of rows."""

from __future__ import annotations

from rollout.config import MemoryConfig
from rollout.graphs import Buckets, ForwardGraphs
from rollout.graphs.capture import Capture, CudaCapture
from rollout.models.causal_lm import CausalLM


def forward_graphs(
    config: MemoryConfig, model: CausalLM, minimum_rows: int, capture: Capture | None = None
) -> ForwardGraphs | None:
    """None where nothing may be captured: recurrent layers are told slots of their own. What
    sparse ones launch does not depend on where their rows go.

    ``capture``: how; default: as CUDA graphs on a GPU, else not at all.
    """
    spec, device = model.spec, model.device
    if capture is None and device.type == "cuda":
        capture = CudaCapture(device)
    if capture is None or not config.graph_bytes or spec.linear_attention is not None:
        return None
    buckets = Buckets(
        max_rows=config.graph_rows,
        max_context_len=spec.max_context_len,
        minimum_rows=minimum_rows,
    )
    return ForwardGraphs(buckets, max_bytes=config.graph_bytes, capture=capture, device=device)
