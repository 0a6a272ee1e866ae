"""Records hidden states of running requests into a ring, for draft training; and its options.

Legend: T query rows of a step, N recorded rows, F feature columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.types import EntryResult, FinishReason, Request, Scheduled
from rollout.validation import checked_int
from spec_workers.features.feature_ring import DTYPES, FeatureRing
from spec_workers.step.observation import Observation
from spec_workers.target import TargetWorker

SHORTEST = 2  # rows: one for the draft to read, and one for the label of its guess


@dataclass(slots=True)
class _Unwritten:
    """Recorded features of a running request, at consecutive positions."""

    first_position: int
    weight_version: int
    blocks: list[torch.Tensor] = field(default_factory=list)
    num_rows: int = 0

    @property
    def end(self) -> int:
        return self.first_position + self.num_rows


class FeatureRecorder:
    """Records one request in ``every`` and writes it to the ring when it ends.

    The features are those that the target computed anyway, for runs and for accepted draft nodes.
    A request's unwritten rows are dropped when new weights run it, so no sequence mixes weight
    versions. A request too long for the ring is written in several sequences. So are the longest
    ones when all unwritten rows take as much memory as the ring.

    Fewer requests are recorded where the ring could not hold all of them until it is next read,
    so recording into a ring that nobody reads soon costs nothing.
    """

    def __init__(self, ring: FeatureRing, every: int = 1) -> None:
        self.ring = ring
        self.num_rows = 0  # recorded in total
        self._min_every = self._every = every
        self._num_seen = 0
        self._followed: dict[Request, _Unwritten | None] = {}  # None: no unwritten rows
        self._ignored: set[Request] = set()
        self._unwritten_rows = 0
        self._times_read = ring.times_read
        self._ended_bytes = 0  # of all requests that ended since the ring was last read

    def observe(self, step: Observation, available: AuxHiddenStates, weight_version: int) -> None:
        """Record the rows of followed requests.

        ``available``: the layout of the step's features, which includes the ring's.
        """
        entries: list[Scheduled] = []
        index: list[np.ndarray] = []
        for b, (entry, result) in enumerate(zip(step.batch.entries, step.results, strict=True)):
            if self._follows(entry.request):
                entries.append(entry)
                index.append(_computed_rows(entry, result, int(step.forwarded.offsets_B1[b])))
        if not entries:
            return
        self._bound_unwritten()
        features_TF = step.forwarded.features_TF
        index_N = torch.from_numpy(np.concatenate(index)).to(features_TF.device)
        wanted_NF = available.select(features_TF.index_select(0, index_N), self.ring.features)
        rows_NF = wanted_NF.to("cpu", self.ring.dtype)
        blocks = rows_NF.split([len(rows) for rows in index])
        for entry, block in zip(entries, blocks, strict=True):
            # A copy: a view would hold all of the step's rows as long as this request runs.
            self._record(entry, block.clone(), weight_version)

    def release(self, request: Request) -> None:
        self._ended_bytes += len(request.tokens) * self.ring.row_bytes
        self._ignored.discard(request)
        if request in self._followed:
            if request.finish_reason is FinishReason.ERROR:  # its features may be NaN
                self._forget(request)
            self._write(request)
            del self._followed[request]

    def counters(self) -> dict[str, float]:
        """Gauges and totals, for metrics."""
        return {
            "sequences": self.ring.num_written,
            "rows": self.num_rows,
            "every": self._every,
            "unwritten_bytes": self._unwritten_rows * self.ring.row_bytes,
        }

    def _follows(self, request: Request) -> bool:
        if request in self._followed:
            return True
        if request in self._ignored:
            return False
        self._adapt()
        follows = self._num_seen % self._every == 0
        self._num_seen += 1
        if follows:
            self._followed[request] = None
        else:
            self._ignored.add(request)
        return follows

    def _adapt(self) -> None:
        needed = -(-self._ended_bytes // self.ring.capacity)
        if self.ring.times_read != self._times_read:
            self._times_read, self._ended_bytes = self.ring.times_read, 0
            self._every = max(self._min_every, needed)
        self._every = max(self._every, needed)

    def _record(self, entry: Scheduled, block: torch.Tensor, weight_version: int) -> None:
        request, position = entry.request, entry.start
        unwritten = self._followed[request]
        if unwritten is not None:
            again = unwritten.end - position  # positions computed again after a preemption
            if unwritten.weight_version != weight_version or not 0 <= again <= unwritten.num_rows:
                self._forget(request)
            else:
                position, block = position + again, block[again:]
        max_rows = self.ring.max_rows(len(request.tokens) + len(block))
        if len(block) > max_rows:
            position, block = position + len(block) - max_rows, block[-max_rows:]
        unwritten = self._followed[request]
        if unwritten is not None and unwritten.num_rows + len(block) > max_rows:
            self._write(request)
            unwritten = None
        if unwritten is None:
            unwritten = self._followed[request] = _Unwritten(position, weight_version)
        unwritten.blocks.append(block)
        unwritten.num_rows += len(block)
        self._unwritten_rows += len(block)
        self.num_rows += len(block)

    def _bound_unwritten(self) -> None:
        while self._unwritten_rows * self.ring.row_bytes > self.ring.capacity:
            rows = {request: each.num_rows for request, each in self._followed.items() if each}
            self._write(max(rows, key=rows.__getitem__))

    def _write(self, request: Request) -> None:
        """Write a request's unwritten rows to the ring. Called when its tokens reach beyond
        them."""
        unwritten = self._followed[request]
        # A step that raised may have recorded rows of tokens that were never appended.
        if (
            unwritten is not None
            and SHORTEST <= unwritten.num_rows <= len(request.tokens) - unwritten.first_position
        ):
            self.ring.write(
                request.tokens,
                unwritten.blocks,
                first_position=unwritten.first_position,
                prompt_len=request.prompt_len,
                weight_version=unwritten.weight_version,
            )
        self._forget(request)

    def _forget(self, request: Request) -> None:
        unwritten = self._followed[request]
        if unwritten is not None:
            self._unwritten_rows -= unwritten.num_rows
            self._followed[request] = None


def _computed_rows(entry: Scheduled, result: EntryResult, first: int) -> np.ndarray:
    """Indices of the entry's run and accepted nodes among the step's query rows.

    Their positions are consecutive from ``entry.start`` on. ``first``: index of its first row.
    """
    nodes = np.array(result.path, dtype=np.int64) - 1
    rows = np.concatenate([np.arange(entry.run_len), entry.run_len + nodes])
    return first + rows


_FIELD = "spec.feature_ring"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureRingOptions:
    """Whether and how hidden states are recorded."""

    num_bytes: int = 0  # bound on what is held; 0: nothing is recorded
    dtype: str | None = None  # float32, bfloat16 or float16; default: the target's
    every: int = 1  # record one request in so many, fewer if the ring turns over too fast

    def __post_init__(self) -> None:
        checked_int(self.num_bytes, f"{_FIELD}.num_bytes")
        checked_int(self.every, f"{_FIELD}.every", minimum=1)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidInputError(
                f"{_FIELD}.dtype", self.dtype, f"must be null or one of {', '.join(DTYPES)}"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Self:
        """Options from a mapping. Raises InvalidInputError for a bad value or an unknown option."""
        known = [field.name for field in fields(cls)]
        if options is not None and not isinstance(options, Mapping):
            raise InvalidInputError(_FIELD, options, f"must be a mapping of {', '.join(known)}")
        for name, value in (options or {}).items():
            if name not in known:
                raise InvalidInputError(
                    f"{_FIELD}.{name}",
                    value,
                    f"is not an option; known options: {', '.join(known)}",
                )
        return cls(**(options or {}))

    def recorder(self, target: TargetWorker, drafted: AuxHiddenStates) -> FeatureRecorder | None:
        """A recorder of the states in ``drafted`` and of the final ones, from which labels come.

        None if ``num_bytes`` is 0. Raises InvalidInputError for a ring too small for its sequences.
        """
        if not self.num_bytes:
            return None
        ring = FeatureRing(
            self.num_bytes,
            drafted | AuxHiddenStates(final=True),
            target.model.spec.hidden_size,
            DTYPES[self.dtype] if self.dtype else target.model.dtype,
            field=f"{_FIELD}.num_bytes",
        )
        return FeatureRecorder(ring, self.every)
