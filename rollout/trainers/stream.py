"""One pass over a model's weights, in which all ranks go on together or stop together.

Before each bucket's collectives, and once after the last tensor, the ranks agree that none has
failed. A rank that fails between two of these says so at the next one and the others raise there,
so nobody waits in a collective for a rank that has left, and nobody takes the end of the stream
for the end of a good update.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

import torch

from rollout.trainers.param_ref import ParamRef, Weight
from rollout.trainers.ranks import Ranks
from rollout.weights.manifest import Manifest


class Gathering(Protocol):
    """The part of `ParameterSource` that a stream uses; see there."""

    ranks: Ranks

    def weights(self) -> list[Weight]: ...

    def manifest_of(self, weights: Iterable[Weight]) -> Manifest: ...

    def buckets(self, weights: Iterable[Weight]) -> Iterator[list[Weight]]: ...

    def gathered(self, refs: Sequence[ParamRef]) -> AbstractContextManager[list[torch.Tensor]]: ...

    def value(self, weight: Weight, inputs: Sequence[torch.Tensor]) -> torch.Tensor: ...


class WeightStream:
    """A `WeightSource` for one use. Close it, or use it in ``with``, on every rank.

    A closed stream that was not read to its end is a failure, which every other rank raises as
    WeightUpdateError.
    """

    def __init__(self, source: Gathering) -> None:
        self._source = source
        self._weights = source.weights()
        self._tensors = self._run()
        self._awaited = True  # the other ranks wait for this one's word, or will
        self.finished = False  # every rank has read all of it
        self.num_tensors = 0
        self.num_bytes = 0

    def manifest(self) -> Manifest:
        return self._source.manifest_of(self._weights)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        # A consumer's inference mode would make inference tensors of the trainer's parameters.
        with torch.inference_mode(False), torch.no_grad():
            name, tensor = next(self._tensors)
        self.num_tensors += 1
        self.num_bytes += tensor.nbytes
        return name, tensor

    def _run(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        source = self._source
        for bucket in source.buckets(self._weights):
            self._agree()
            # A rank that fails inside the gather's own collectives cannot tell the others.
            self._awaited = False
            with source.gathered([ref for weight in bucket for ref in weight.inputs]) as tensors:
                self._awaited = True
                given = iter(tensors)
                for weight in bucket:
                    yield weight.name, source.value(weight, [next(given) for _ in weight.inputs])
        self._agree()
        self._awaited = False
        self.finished = True

    def _agree(self) -> None:
        self._awaited = False
        self._source.ranks.go_on()
        self._awaited = True

    def close(self) -> None:
        """Let go of what is gathered; tell the other ranks where they still count on this one."""
        with torch.inference_mode(False), torch.no_grad():
            self._tensors.close()
        if self._awaited:
            self._awaited = False
            self._source.ranks.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
