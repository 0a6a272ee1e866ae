"""A device that is not there, for measuring the host: it takes no time and says what was recorded.

Everything the host does for a GPU is done: inputs are laid out, padded and packed, changes of
req_to_token are found, graphs are looked up, results are unpacked. What is left out is what runs
there, and what torch, Triton and CUDA take to launch it.

Legend: T query rows, E hidden, R sampled rows, B entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from forced import Recording

from rollout.ops import tree_accept
from rollout.ops.tree_accept import reference
from rollout.runner.graphs.capture import Tensors
from rollout.runner.model_runner import Forwarded
from rollout.sampling import sampler
from rollout.sampling.sampler import SampleOutputs
from rollout.types import Batch, DraftTrees
from spec_workers.target import TargetWorker


class HostClock:
    """Adds up the host's seconds while the device idles, and while it computes. What stands in for
    the device does not count.

    Takes about half a microsecond per timed call.
    """

    def __init__(self) -> None:
        self.idle_seconds = self.covered_seconds = 0.0
        self._stand_ins = 0  # calls under way
        self._is_covered = False  # the device computes
        self._since = time.perf_counter()
        self._originals: list[tuple[Any, str, Any]] = []

    @contextmanager
    def device(self, *, waits: bool = False, launches: bool = False) -> Iterator[None]:
        """A block that stands in for the device, which ``waits`` for it, or ``launches`` what it
        computes from the end on."""
        self._turn()
        self._stand_ins += 1
        self._is_covered = self._is_covered and not waits
        try:
            yield
        finally:
            self._turn()
            self._stand_ins -= 1
            self._is_covered = self._is_covered or launches

    def wait_at(self, owner: Any, name: str) -> None:
        """When a call of ``owner.name`` begins, the device is done."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.device(waits=True):
                pass
            return function(*args, **kwargs)

        self._replace(owner, name, timed)

    def launch_at(self, owner: Any, name: str) -> None:
        """A call of ``owner.name`` launches."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.device(launches=True):
                return function(*args, **kwargs)

        self._replace(owner, name, timed)

    def stop(self) -> None:
        """Call everything as before."""
        for owner, name, function in reversed(self._originals):
            setattr(owner, name, function)

    def take(self) -> tuple[float, float]:
        """Seconds since the last call: while the device idled, and while it computed."""
        self._turn()
        taken = self.idle_seconds, self.covered_seconds
        self.idle_seconds = self.covered_seconds = 0.0
        return taken

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def _turn(self) -> None:
        now = time.perf_counter()
        if not self._stand_ins:
            if self._is_covered:
                self.covered_seconds += now - self._since
            else:
                self.idle_seconds += now - self._since
        self._since = now


@dataclass(frozen=True, slots=True)
class NoGraph:
    """A graph that computes nothing: its results stay what they were."""

    results: Tensors
    num_bytes: int = 1

    def replay(self) -> None:
        pass


class NoCapture:
    """Makes graphs that compute nothing."""

    shares_memory = True

    def __call__(
        self,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors],
        max_bytes: int | None = None,
    ) -> NoGraph:
        return NoGraph(make_outputs(function()))

    def reset(self) -> None:
        pass


class StandIn:
    """Takes the place of the target's network and of what samples from it."""

    def __init__(self, target: TargetWorker, recording: Recording, clock: HostClock) -> None:
        self._clock = clock
        self._recording = recording
        self._tokens: list[int] = []  # of the rows to be sampled from
        self._logits = torch.zeros(1, 1)
        self._forward = target.runner.forward
        self._hidden_size = target.model.spec.hidden_size
        model: Any = target.model
        model.forward, model.logits = self._compute, self._head
        clock.launch_at(model, "forward")
        target.runner.forward = self._noted  # type: ignore[method-assign]
        drawing: Any = sampler
        drawing._computed = self._draw
        accepting: Any = tree_accept
        accepting.accept = self._accept

    def _noted(
        self,
        batch: Batch,
        trees: DraftTrees,
        take_logits: Callable[[torch.Tensor], object],
        **options: Any,
    ) -> Forwarded:
        with self._clock.device():
            self._tokens = self._recording.sampled(batch, trees)
        return self._forward(batch, trees, take_logits, **options)

    def _compute(self, input_ids_T: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(len(input_ids_T), self._hidden_size)

    def _head(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden_RE), 1)

    def _draw(self, logits_RV: torch.Tensor, *args: Any) -> SampleOutputs[torch.Tensor]:
        with self._clock.device():
            tokens = torch.tensor(self._tokens[: len(logits_RV)], dtype=torch.int64)
            del self._tokens[: len(logits_RV)]
            logprobs = torch.zeros(len(tokens), dtype=torch.float32)
        return SampleOutputs(tokens_R=tokens, logprobs_R=logprobs)

    def _accept(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self._clock.device():
            return reference.accept(*args)
