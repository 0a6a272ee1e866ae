"""A worker's weights to its replica's server, which is on the same host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch

from rollout.weights.shared_memory import SharedMemorySender

WorkerWeights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


async def send_weights(
    server: Any, weights: WorkerWeights, *, global_steps: int | None, bucket_bytes: int
) -> None:
    """One update of ``server``, a Ray actor, as one transaction; ``weights`` run to their end.

    Taking the next tensor may be a collective of all ranks. So where the server fails, what is left
    is taken all the same before its error is raised. Where ``weights`` fail, the server is told,
    and serves nothing until a later update succeeds.

    ``bucket_bytes``: of shared memory; one half is filled while the other is read.
    """
    update = _Update(server)
    await update.call("begin_weight_update")
    try:
        with SharedMemorySender(bucket_bytes, num_segments=2) as sender:
            loading = None
            try:
                async for handle in _handles(sender, weights, bucket_bytes):
                    if loading is not None:
                        await update.wait(loading)
                    loading = update.start("load_weights", handle)
            finally:  # it reads what goes with the sender
                if loading is not None:
                    await update.wait(loading)
    except BaseException as error:
        await update.call("abandon_weight_update", f"the sending worker failed: {error!r}")
        raise
    await update.call("end_weight_update", global_steps)
    if update.failure is not None:
        raise update.failure


class _Update:
    """Calls of the server up to the first that fails."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.failure: Exception | None = None

    def start(self, method: str, *arguments: Any) -> Any:
        if self.failure is None:
            return getattr(self._server, method).remote(*arguments)
        return None

    async def wait(self, call: Any) -> None:
        try:
            await call
        except Exception as error:
            self.failure = self.failure or error

    async def call(self, method: str, *arguments: Any) -> None:
        if (started := self.start(method, *arguments)) is not None:
            await self.wait(started)


async def _handles(
    sender: SharedMemorySender, weights: WorkerWeights, bucket_bytes: int
) -> AsyncIterator[dict[str, Any]]:
    if not isinstance(weights, AsyncIterator):
        for handle in sender.handles(weights):
            yield handle
        return
    async for some in _copied(weights, bucket_bytes // 2):
        for handle in sender.handles(some):
            yield handle


async def _copied(
    weights: AsyncIterator[tuple[str, torch.Tensor]], num_bytes: int
) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
    """In lists of about ``num_bytes``. What is handed out is valid until the next is asked for."""
    some: list[tuple[str, torch.Tensor]] = []
    size = 0
    async for name, tensor in weights:
        if some and size + tensor.nbytes > num_bytes:
            yield some
            some, size = [], 0
        some.append((name, tensor.detach().to("cpu", copy=True)))
        size += tensor.nbytes
    if some:
        yield some
