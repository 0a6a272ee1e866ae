"""RolloutHook: after the optimizer's step, the engine generates with the new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.trainers.parameter_source import BUCKET_BYTES
from rollout.trainers.weight_source import weight_source
from rollout.trainers.weight_stream import WeightStream
from rollout.weights.update_options import UpdateOptions


class WeightReceiver(Protocol):
    @property
    def weight_version(self) -> int:
        """The version of the weights in use."""
        ...

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        weight_version: int | None = None,
        **options: Any,
    ) -> object:
        """Returns when the weights serve. Each tensor is valid until the next one is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSync:
    version: int  # of the weights the engines have now
    num_tensors: int
    num_bytes: int  # of the tensors as they were streamed on this rank
    seconds: float


class RolloutHook:
    """Streams a trainer's weights into an engine after its optimizer steps.

    Args:
        engine: what generates; None on a rank that has none. With a model on several ranks
            (DeepSpeed, FSDP, DDP) every rank makes a hook and calls it at the same points.
        model: the trainer's: see `weight_source` for what it may be.
        every: `step` syncs each ``every``-th optimizer step.
        bucket_bytes: of `weight_source`. A sync takes one bucket of extra memory.
        dtype: of `weight_source`.
        adapters_only: send LoRA adapters without their weights, which the engine has from the start
            (the model's folder) or from an earlier update.
        after_sync: called after each sync, on ranks that have an engine: to co-train its draft, for
            one. The other ranks do not wait for it here, but in their next collective.
        options: of every ``update_weights_from_tensor``: ``flush_cache``, ``check_finite``, ...

    Raises InvalidInputError for a model that cannot be streamed.
    """

    def __init__(
        self,
        engine: WeightReceiver | None,
        model: nn.Module,
        every: int = 1,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: str | torch.dtype | None = None,
        adapters_only: bool = False,
        after_sync: Callable[[WeightSync], object] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise InvalidInputError("every", every, "must be a positive integer")
        if "weight_version" in options:
            raise InvalidInputError(
                "weight_version", options["weight_version"], "the hook counts versions itself"
            )
        UpdateOptions.of(options)  # refuses what no update would take
        self.engine = engine
        self.every = every
        self.source = weight_source(model, bucket_bytes=bucket_bytes, dtype=dtype)
        if adapters_only:
            self.source.stream_adapters_only()
        self.after_sync = after_sync
        self.options = options
        self.num_steps = 0

    def sync(self) -> WeightSync:
        """Bring the engines of all ranks to the model's weights, all or none.

        A collective of the ranks the model is on. If any rank fails, every rank raises: that one
        its own error, the others WeightUpdateError; an engine already written to then refuses to
        generate until a full sync succeeds. Versions go up by one from the highest of any engine.
        """
        started = time.perf_counter()
        ranks = self.source.ranks
        version = self._next_version()
        with self.source.stream() as stream:
            try:
                self._take(stream, version)
            except BaseException:
                if stream.finished:
                    ranks.stop()  # the others have read it all and wait for the word below
                raise
        ranks.go_on()
        done = WeightSync(
            version, stream.num_tensors, stream.num_bytes, time.perf_counter() - started
        )
        if self.after_sync is not None and self.engine is not None:
            self.after_sync(done)
        return done

    def _next_version(self) -> int:
        """The next weight version, the same on every rank."""
        ranks = self.source.ranks
        try:
            version = -1 if self.engine is None else self.engine.weight_version
        except BaseException:
            ranks.stop()
            raise
        ranks.go_on()
        (newest,) = ranks.all_reduce_max(version)
        if newest < 0:
            raise InvalidInputError("engine", None, "no rank has an engine to bring weights to")
        return newest + 1

    def _take(self, stream: WeightStream, version: int) -> None:
        if self.engine is not None:
            options = self.options
            if self.source.adapters_only:
                options = {"lora_scaling": self.source.lora_scaling, **options}
            self.engine.update_weights_from_tensor(stream, weight_version=version, **options)
        for name, _ in stream.sliced({}) if self.engine is None else stream:
            if self.engine is not None:
                raise WeightUpdateError(f"the engine returned before it had taken {name}")

    def step(self) -> WeightSync | None:
        """Count one optimizer step; sync if it is an ``every``-th one.

        Call it on every rank after ``optimizer.step()``, or after DeepSpeed's ``engine.step()``: of
        that, steps between two accumulation boundaries and steps skipped for an overflow do not
        count.
        """
        if not self.source.step_applied:
            return None
        self.num_steps += 1
        return self.sync() if self.num_steps % self.every == 0 else None
