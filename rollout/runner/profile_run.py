"""The profile run: memory that a step takes besides weights and KV; and warm-up.

Both are found by running steps of padding before there is any KV.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from rollout.errors import OutOfMemoryError
from rollout.models.layers.linear import Linear
from rollout.ops import gpu
from rollout.ops.matmul.tiles import tile_for, tiles_up_to
from rollout.runner.dummy_run import DummyRun
from rollout.runner.logit_blocks import MAX_ROWS

log = logging.getLogger(__name__)


def warm_rows(max_rows: int, linears: Iterable[Linear]) -> dict[int, bool]:
    """Numbers of rows of steps that together run every tile that a step of up to ``max_rows`` runs
    in products of ``ops.matmul`` and, as some are twice the one before, in those of experts.

    From the least to the largest, each with whether it is to run with draft nodes too: attention's
    tiles follow rows by powers of two, and draft nodes are another variant of its kernel.
    """
    both = {1 << k for k in range(max_rows.bit_length())} | {max_rows}
    found = dict.fromkeys(both, True)
    for dtype, outputs, device, left_out in dict.fromkeys(
        (linear.dtype, linear.out_features, linear.device, linear.left_out_tiles)
        for linear in linears
        if linear.row_invariant
    ):
        product = outputs, gpu.multiprocessors(device), left_out
        run = {tile_for(dtype, rows, *product) for rows in found}
        for tile, rows in tiles_up_to(dtype, max_rows, *product).items():
            if tile not in run:
                found[rows] = False
    return dict(sorted(found.items()))


@torch.inference_mode()
def warm_up(steps: DummyRun, *, rows: int, sampled: int) -> None:
    """Run what is compiled for steps of up to ``rows`` query rows, whatever their batch.

    ``sampled``: most rows that are sampled from. Raises OutOfMemoryError.
    """
    began, ranks = time.perf_counter(), steps.model.ranks.all
    with _fitting(steps, rows, sampled):
        own = list(warm_rows(rows, steps.model.linears()).items())
        # Ranks wait for each other in every forward, and their parts of a product may differ.
        for each, with_nodes in json.loads(ranks.broadcast_bytes(json.dumps(own).encode())):
            hidden_TE = steps.forward(each)
            if with_nodes:
                hidden_TE = steps.forward(each, nodes=each)
            steps.model.logits(hidden_TE[: min(sampled, MAX_ROWS)])
        steps.sample(hidden_TE, 1)
    log.info(
        "%s: kernels were compiled and loaded in %.1f s",
        steps.model.device,
        time.perf_counter() - began,
    )


def activation_bytes(steps: DummyRun, *, rows: int, sampled: int) -> int:
    """Bytes that steps of up to ``rows`` query rows take on a GPU, ``sampled`` of them sampled.

    After `warm_up`, whose memory then counts as taken. On the CPU 0: nothing is measured. Raises
    OutOfMemoryError.
    """
    device = steps.model.device
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with _fitting(steps, rows, sampled):
        run_largest(steps, rows=rows, sampled=sampled)
    return torch.cuda.max_memory_allocated(device) - before


def run_largest(steps: DummyRun, *, rows: int, sampled: int) -> None:
    """The step of the most rows."""
    steps.sample(steps.forward(rows, nodes=rows), sampled)


@contextmanager
def _fitting(steps: DummyRun, rows: int, sampled: int) -> Iterator[None]:
    """Raise OutOfMemoryError, with the remedy, if the steps that run inside do not fit; wait for
    the device at the end, and give back what they took."""
    device = steps.model.device
    try:
        with gpu.on(device):
            yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {rows} query rows, {sampled} of them sampled from, does not fit {device} "
            "beside the weights: lower scheduler.max_step_tokens or scheduler.max_running"
        ) from error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # KV within a segment that torch keeps would hold all of it, also while KV alone is needed.
        torch.cuda.empty_cache()
