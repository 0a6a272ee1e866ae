"""Hidden states of requests as they run, into a ring: for whoever trains a draft on them.

Legend: T query rows of a step, N of them that are recorded, F feature columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.types import EntryResult, FinishReason, Request, Scheduled
from spec_workers.features.feature_ring import FeatureRing
from spec_workers.observation import Observation

SHORTEST = 2  # rows: one for the draft to read, one that says what it should have predicted


@dataclass(slots=True)
class _Unwritten:
    """The features recorded of a running request, of consecutive positions."""

    first_position: int
    weight_version: int
    blocks: list[torch.Tensor] = field(default_factory=list)
    num_rows: int = 0

    @property
    def end(self) -> int:
        return self.first_position + self.num_rows


class FeatureRecorder:
    """Follows each n-th request and writes it to the ring when it ends.

    The features are those the target computed anyway: of runs and of accepted draft nodes.
    What was recorded of a request is dropped when new weights run it: no sequence mixes weight
    versions. A request too long for the ring is written in chunks, and so are the longest when all
    that is unwritten takes as much memory as the ring.

    Fewer than each ``every``-th are followed while more would be written than the ring holds
    between two visits of a reader: a ring that nobody reads soon costs nothing.
    """

    def __init__(self, ring: FeatureRing, every: int = 1) -> None:
        if not isinstance(every, int) or every < 1:
            raise InvalidInputError("every", every, "must be an integer >= 1")
        self.ring = ring
        self.num_rows = 0  # ever recorded
        self._min_every = self._every = every
        self._num_seen = 0
        self._followed: dict[Request, _Unwritten | None] = {}  # None: nothing is recorded yet
        self._ignored: set[Request] = set()
        self._unwritten_rows = 0
        self._times_taken = ring.times_taken
        self._ended_bytes = 0  # since then, of all requests that ended, followed or not

    def observe(self, step: Observation, available: AuxHiddenStates, weight_version: int) -> None:
        """Keep the rows of followed requests.

        ``available``: what the columns of the step's features are; the ring's among them.
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
            # A copy: a view would keep all of the step's rows as long as this request runs.
            self._keep(entry, block.clone(), weight_version)

    def release(self, request: Request) -> None:
        """The request ended."""
        self._ended_bytes += len(request.tokens) * self.ring.row_bytes
        self._ignored.discard(request)
        if request in self._followed:
            if request.finish_reason is FinishReason.ERROR:  # its features may be NaN
                self._forget(request)
            self._write(request)
            del self._followed[request]

    def counters(self) -> dict[str, float]:
        """Gauges, for metrics."""
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
        if self.ring.times_taken != self._times_taken:
            self._times_taken, self._ended_bytes = self.ring.times_taken, 0
            self._every = max(self._min_every, needed)
        self._every = max(self._every, needed)

    def _keep(self, entry: Scheduled, block: torch.Tensor, weight_version: int) -> None:
        request, position = entry.request, entry.start
        unwritten = self._followed[request]
        if unwritten is not None:
            again = unwritten.end - position  # after a preemption: positions it has computed before
            if unwritten.weight_version != weight_version or not 0 <= again <= unwritten.num_rows:
                self._forget(request)
            else:
                position, block = position + again, block[again:]
        most = self.ring.max_rows(len(request.tokens) + len(block))
        if len(block) > most:
            position, block = position + len(block) - most, block[-most:]
        unwritten = self._followed[request]
        if unwritten is not None and unwritten.num_rows + len(block) > most:
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
            rows = {
                request: unwritten.num_rows
                for request, unwritten in self._followed.items()
                if unwritten
            }
            self._write(max(rows, key=rows.__getitem__))

    def _write(self, request: Request) -> None:
        """Write what is recorded of a request into the ring.

        Called between its rows and those of its next step: its tokens reach beyond its rows.
        """
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
    """The step's query rows at consecutive positions from ``entry.start`` on."""
    nodes = np.array(result.path, dtype=np.int64) - 1
    rows = np.concatenate([np.arange(entry.run_len), entry.run_len + nodes])
    return first + rows
