"""What a step takes beside weights and KV, and what compiles before the first request.

Both are found by running steps of padding before there is any KV.
"""

from __future__ import annotations

import logging
import time

import torch

from rollout.errors import OutOfMemoryError
from rollout.memory.padding_steps import PaddingSteps
from rollout.ops import gpu
from rollout.ops.paged_attention import most_spread_rows

log = logging.getLogger(__name__)

_WARM_ROWS = (1, 65, 129, 513)
"""Of the steps that are run: every tile of `ops.matmul` serves one, and attention has a program per
split in the first and walks all of them in the last."""

_WARM_SAMPLED = 4


def warm_up(steps: PaddingSteps, most_rows: int) -> None:
    """Run what is compiled for steps of up to ``most_rows``, whatever their batch."""
    began = time.perf_counter()
    with gpu.on(steps.model.device):
        for rows in sorted({min(rows, most_rows) for rows in _WARM_ROWS}):
            for nodes in (0, rows):
                hidden_TE = steps.forward(rows, nodes=nodes)
            steps.sample(hidden_TE, min(rows, _WARM_SAMPLED))
    if steps.model.device.type == "cuda":
        torch.cuda.synchronize(steps.model.device)
    log.info(
        "%s: kernels were compiled and loaded in %.1f s",
        steps.model.device,
        time.perf_counter() - began,
    )


def activation_bytes(steps: PaddingSteps, *, rows: int, sampled: int) -> int:
    """Bytes that steps of up to so many query rows take on a GPU, ``sampled`` of them sampled from.

    After `warm_up`, whose memory then counts as taken. On the CPU 0: nothing is measured. Raises
    OutOfMemoryError.
    """
    device = steps.model.device
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with gpu.on(device):
            run_largest(steps, rows=rows, sampled=sampled)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {rows} query rows, {sampled} of them sampled from, does not fit {device} "
            "beside the weights: lower scheduler.max_step_tokens or scheduler.max_running"
        ) from error
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def run_largest(steps: PaddingSteps, *, rows: int, sampled: int) -> None:
    """The step of the most rows, and the largest one in which attention keeps a sum per split."""
    spec = steps.model.spec
    spread_rows = most_spread_rows(
        spec.num_heads, spec.num_kv_heads, steps.model.dtype, steps.model.device
    )
    if spread_rows:
        steps.forward(min(rows, spread_rows), longest=spec.max_context_len)
    steps.sample(steps.forward(rows, nodes=rows), sampled)
