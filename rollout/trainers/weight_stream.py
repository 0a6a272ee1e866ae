"""WeightStream: one pass over a trainer's weights, of all its ranks together."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Self

import torch

from rollout.trainers.param_ref import Weight
from rollout.trainers.shard_exchange import FlatShard, ShardExchange
from rollout.weights.manifest import Manifest, Slices, slices_from_json, slices_to_json
from rollout.weights.source import WeightTensors

if TYPE_CHECKING:
    from rollout.trainers.parameter_source import ParameterSource


class WeightStream(WeightTensors):
    """A source for one use. Close it, or use it in ``with``, on every rank.

    In one pass over a model's weights all ranks go on together or stop together. Before each
    bucket's collectives, and once after the last tensor, they agree that none has failed. A rank
    that fails between two of these says so at the next one and the others raise WeightUpdateError
    there: no rank waits in a collective for one that has left, or takes the end of the stream
    for the end of a good update. A closed stream that was not read to its end is such a failure.

    Where a rank asks for slices, every rank gets what it asked for and no more: whole tensors if
    it did not ask. Parameters that no rank can send slices of are gathered whole on all ranks.
    """

    def __init__(self, source: ParameterSource) -> None:
        self._source = source
        self._weights = source.weights()
        self._tensors = self._run()
        self._needed: Slices | None = None  # None: all of all
        self._awaited = True  # the other ranks wait for this one's word, or will
        self.finished = False  # every rank has read all of it
        self.num_tensors = 0
        self.num_bytes = 0

    def manifest(self) -> Manifest:
        """The manifest of this pass."""
        return self._source.manifest_of(self._weights)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def sliced(self, needed: Slices) -> Iterator[tuple[str, torch.Tensor]]:
        """This stream with only the needed slices of weights; called before it is read."""
        self._needed = needed
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
        exchange = self._exchange()
        for bucket in source.buckets(self._weights):
            self._agree()
            # A rank that fails inside the collectives cannot tell the others.
            self._awaited = False
            shards = {} if exchange is None else _flat_shards(source, bucket)
            pieces = exchange.run(shards) if exchange is not None and shards else {}
            gathered = [weight for weight in bucket if weight.name not in shards]
            with source.gathered([ref for weight in gathered for ref in weight.inputs]) as tensors:
                self._awaited = True
                given = iter(tensors)
                for weight in bucket:
                    name = weight.name
                    if exchange is not None and name in pieces:
                        yield name, exchange.needed_slice(name, pieces.pop(name))
                    elif name not in shards:
                        inputs = [next(given) for _ in weight.inputs]
                        yield from self._needed_slice(name, source.value(weight, inputs))
        self._agree()
        self._awaited = False
        self.finished = True

    def _exchange(self) -> ShardExchange | None:
        """The exchange that the ranks agree on; None where none of them asks for slices."""
        ranks = self._source.ranks
        if len(ranks.groups) != 1:
            return None
        self._agree()
        self._awaited = False
        manifest = self.manifest()
        own = json.dumps(None if self._needed is None else slices_to_json(self._needed))
        asked = [json.loads(text) for text in ranks.all_gather_text(own)]
        self._awaited = True
        if not any(each and any(each.values()) for each in asked):
            return None
        whole: Slices = dict.fromkeys(manifest)
        needed = [
            whole if each is None else slices_from_json(each, manifest, f"needed[{rank}]")
            for rank, each in enumerate(asked)
        ]
        return ShardExchange(ranks.groups[0], ranks.device, manifest, needed)

    def _needed_slice(self, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The needed slice of a whole tensor, if any is needed."""
        where = None if self._needed is None else self._needed.get(name)
        if where is not None:
            yield name, where.of(value)
        elif not self._needed or name in self._needed:
            yield name, value

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

    def __exit__(self, *error: object) -> None:
        self.close()


def _flat_shards(source: ParameterSource, bucket: Iterable[Weight]) -> dict[str, FlatShard]:
    """The shards of those weights of a bucket whose slices can be sent from rank to rank."""
    found = {
        weight.name: source.flat_shard(weight.inputs[0])
        for weight in bucket
        if weight.combine is None
    }
    return {name: shard for name, shard in found.items() if shard is not None}
