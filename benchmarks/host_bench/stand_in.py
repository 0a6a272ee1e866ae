"""A device that is not there: it takes no time, and says what was recorded.

Everything the host does for a GPU is done: inputs are laid out, padded and packed, changes of
req_to_token are found, graphs are looked up, results are unpacked. What is left out is what runs
there, and what torch, Triton and CUDA take to launch it.

Legend: T query rows, E hidden, R sampled rows, B entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from replay_bench.forced import Recording

from host_bench.phases import Phases
from rollout.ops import gpu, tree_accept
from rollout.ops.tree_accept import reference
from rollout.runner.model_runner import Forwarded
from rollout.sampling import sampler
from rollout.sampling.sampler import SampleOutputs
from rollout.types import Batch, DraftTrees
from spec_workers.target import TargetWorker

DEVICE = "device"
"""The phase that is no host's: what stands in for the device takes here."""


def pretend_gpu() -> None:
    """From now on whatever is on the CPU goes the way of a GPU. Before anything else is made."""
    gpu.runs_on = lambda device: True


class NoCapture:
    """Graphs that compute nothing."""

    num_bytes = 1

    def __call__(self, run: Callable[[], None], max_bytes: int | None = None) -> NoCapture:
        return self

    def replay(self) -> None:
        pass

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

    def _noted(self, batch: Batch, trees: DraftTrees, **options: Any) -> Forwarded:
        self._phases.enter(DEVICE)
        self._tokens = []
        for b, entry in enumerate(batch.entries):
            if entry.samples:
                first, last = int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])
                depths = [0, *trees.depths_N[first:last].tolist()]
                at = self._recording.at
                self._tokens += [at(entry.request, entry.end + depth) for depth in depths]
        self._phases.leave()
        return self._forward(batch, trees, **options)

    def _compute(self, input_ids_T: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty(len(input_ids_T), self._hidden_size)

    def _head(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden_RE), 1)

    def _draw(self, logits_RV: torch.Tensor, *args: Any) -> SampleOutputs[torch.Tensor]:
        self._phases.enter(DEVICE)
        tokens = torch.tensor(self._tokens, dtype=torch.int64)
        logprobs = torch.zeros(len(tokens), dtype=torch.float32)
        self._phases.leave()
        return SampleOutputs(tokens_R=tokens, logprobs_R=logprobs)

    def _accept(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._phases.enter(DEVICE)
        found = reference.accept(*args)
        self._phases.leave()
        return found
