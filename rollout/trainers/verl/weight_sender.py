"""A worker's weights to its replica's server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import safetensors.torch
import torch
from verl.workers.rollout.utils import ensure_async_iterator

NamedTensors = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


async def send_weights(
    server: Any, weights: NamedTensors, *, global_steps: int | None, bucket_bytes: int
) -> None:
    """One update of ``server``, a Ray actor, as one transaction; ``weights`` run to their end.

    Taking the next tensor may be a collective of all ranks. So where the server fails, what is left
    is taken all the same before its error is raised. Where ``weights`` fail, the server is told,
    and serves nothing until a later update succeeds.
    """
    failure: Exception | None = None
    try:
        await server.begin_weight_update.remote()
    except Exception as error:
        failure = error
    try:
        async for bucket in _buckets(weights, bucket_bytes):
            if failure is None:
                try:
                    await server.load_weights.remote(safetensors.torch.save(bucket))
                except Exception as error:
                    failure = error
    except BaseException as error:
        if failure is None:
            await server.abandon_weight_update.remote(f"the sending worker failed: {error!r}")
        raise
    if failure is not None:
        raise failure
    await server.end_weight_update.remote(global_steps)


async def _buckets(
    weights: NamedTensors, bucket_bytes: int
) -> AsyncIterator[dict[str, torch.Tensor]]:
    """On the CPU, of about ``bucket_bytes`` each; a larger tensor is a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    async for name, tensor in ensure_async_iterator(weights):
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        # A copy: what is handed out may live in a buffer that the next one is written to.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket
