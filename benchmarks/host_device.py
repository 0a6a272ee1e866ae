"""A device that is not there, for measuring the host: it takes no time and says what was recorded.

Everything the host does for a GPU is done: inputs are laid out, padded and packed, changes of
req_to_token are found, graphs are looked up, results are unpacked. What is left out is what runs
there, and what torch, Triton and CUDA take to launch it.

Legend: T query rows, E hidden, R sampled rows, B entries.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
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

DEVICE = "device"
"""The phase that is no host's: what stands in for the device takes here."""

COVERED = ", while the device computes"
"""Ends the name of a phase's other share."""


class Phases:
    """``seconds`` by phase: each moment counts for the innermost phase under way, and what the
    device covers counts by itself.

    Two counters of Python's clock and a dozen lines per call: about half a microsecond, which the
    phase around it pays.
    """

    def __init__(self, outermost: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = [outermost]
        self._is_covered = False  # the device computes
        self._since = time.perf_counter()
        self._originals: list[tuple[Any, str, Any]] = []

    def time_calls(
        self, owner: Any, name: str, phase: str, *, waits: bool = False, launches: bool = False
    ) -> None:
        """Count calls of ``owner.name`` for ``phase`` from now on.

        Args:
            waits: for the device, which is done when a call begins.
            launches: what the device computes from the end of a call on.
        """
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase)
            self._is_covered = self._is_covered and not waits
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()
                self._is_covered = self._is_covered or launches

        self._originals.append((owner, name, function))
        setattr(owner, name, timed)

    def stop(self) -> None:
        """Call everything as before."""
        for owner, name, function in reversed(self._originals):
            setattr(owner, name, function)

    def enter(self, phase: str) -> None:
        self._turn()
        self._open.append(phase)

    def leave(self) -> None:
        self._turn()
        self._open.pop()

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self._turn()
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _turn(self) -> None:
        now = time.perf_counter()
        name = self._open[-1]
        self.seconds[name + COVERED if self._is_covered else name] += now - self._since
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

    def __init__(self, target: TargetWorker, recording: Recording, phases: Phases) -> None:
        self._phases = phases
        self._recording = recording
        self._tokens: list[int] = []  # of the rows to be sampled from
        self._logits = torch.zeros(1, 1)
        self._forward = target.runner.forward
        self._hidden_size = target.model.spec.hidden_size
        model: Any = target.model
        model.forward, model.logits = self._compute, self._head
        phases.time_calls(model, "forward", DEVICE, launches=True)
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
        self._phases.enter(DEVICE)
        self._tokens = self._recording.sampled(batch, trees)
        self._phases.leave()
        return self._forward(batch, trees, take_logits, **options)

    def _compute(self, input_ids_T: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(len(input_ids_T), self._hidden_size)

    def _head(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden_RE), 1)

    def _draw(self, logits_RV: torch.Tensor, *args: Any) -> SampleOutputs[torch.Tensor]:
        self._phases.enter(DEVICE)
        tokens = torch.tensor(self._tokens[: len(logits_RV)], dtype=torch.int64)
        del self._tokens[: len(logits_RV)]
        logprobs = torch.zeros(len(tokens), dtype=torch.float32)
        self._phases.leave()
        return SampleOutputs(tokens_R=tokens, logprobs_R=logprobs)

    def _accept(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._phases.enter(DEVICE)
        found = reference.accept(*args)
        self._phases.leave()
        return found
