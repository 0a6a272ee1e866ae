"""Captured forwards: a step is padded to a bucket, whose graph serves all steps that fit.

Legend: T query rows, E hidden, F feature columns, C routes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from numpy.typing import NDArray

from rollout.config import MemoryConfig
from rollout.models.causal_lm import CausalLM
from rollout.ops import gpu
from rollout.parallel import RankGroup
from rollout.runner.batch_layout import StepArrays
from rollout.runner.graphs.buckets import Bucket, Buckets
from rollout.runner.graphs.capture import Capture, CudaCapture, Tensors
from rollout.runner.graphs.graph_runner import GraphRunner
from rollout.runner.graphs.host_capture import host_capture, host_rows

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The results of a forward: hidden states [T, E], features [T, F], routes [T, C]."""

Forward = Callable[[StepArrays[torch.Tensor]], Results]
"""A forward of a step's inputs."""

_RESULTS = ("hidden_TE", "features_TF", "routes_TC")

_OTHER_INPUTS = 1 << 20
"""Bytes of a step's other inputs: changes of req_to_token and the rows of the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentStep:
    """A step whose inputs are where graphs read them."""

    inputs: StepArrays[torch.Tensor]  # padded
    bucket: Bucket
    variant: Hashable


class ForwardGraphs:
    """Graphs of forwards. Callers send a forward's inputs here and run it through here."""

    def __init__(
        self,
        buckets: Buckets,
        *,
        max_bytes: int,
        capture: Capture,
        device: torch.device,
        ranks: RankGroup,
    ) -> None:
        """``ranks``: that run the same forwards."""
        self.buckets = buckets
        self._outputs: dict[Hashable, Tensors] = {}
        self.graph_runner = GraphRunner(
            "forwards",
            max_bytes=lambda: max_bytes,
            capture=capture,
            device=device,
            input_bytes=buckets.input_bytes + _OTHER_INPUTS,
            on_drop=self._outputs.clear,
            ranks=ranks,
        )
        self.is_warm = True  # the last forward neither came in a new shape nor was captured

    def send(self, step: StepArrays[NDArray], variant: Hashable) -> SentStep | None:
        """Send a step's inputs, padded; None where it goes without.

        ``variant``: what a forward depends on beside its inputs' shapes.
        """
        self.is_warm = True
        bucket = None if self.graph_runner.is_idle else self.buckets.bucket(step)
        if bucket is None:
            return None
        padded = step.padded(rows=bucket.rows, entries=bucket.rows, nodes=bucket.nodes)
        inputs = self.graph_runner.send(padded)
        if inputs is None:
            self.is_warm = False
            return None
        return SentStep(inputs=inputs, bucket=bucket, variant=variant)

    def run(self, sent: SentStep, forward: Forward) -> Results:
        """Run the padded step. The results are valid until the next one."""

        def named() -> Tensors:
            results = forward(sent.inputs)
            return dict(zip(_RESULTS, results, strict=True))

        key, variant = (sent.bucket, sent.variant), sent.variant
        results = self.graph_runner.run(key, named, partial(self._outputs_for, variant))
        self.is_warm = self.graph_runner.is_warm
        hidden_TE, features_TF, routes_TC = (results[name] for name in _RESULTS)
        return hidden_TE, features_TF, routes_TC

    def _outputs_for(self, variant: Hashable, like: Tensors) -> Tensors:
        """The first rows of the tensors that all graphs of a variant write to; made like ``like``
        at first."""
        if variant not in self._outputs:
            max_rows = self.buckets.rows[-1]
            self._outputs[variant] = {
                name: each.new_empty((max_rows, each.shape[1])) for name, each in like.items()
            }
        return {name: self._outputs[variant][name][: len(each)] for name, each in like.items()}


def graphs_of_model(
    config: MemoryConfig, model: CausalLM, minimum_rows: int, capture: Capture | None
) -> ForwardGraphs | None:
    """Graphs of the target's forward; None where nothing is to be captured. On a GPU launches
    depend on the shapes of a bucket alone, in recurrent and sparse layers too. Of several ranks all
    run the same rows, and no calls on a CPU: those cannot wait for each other.

    ``capture``: how; None: as CUDA graphs on a GPU, and as calls of compiled ops on a CPU.
    """
    spec, device, linears = model.spec, model.device, model.linears()
    on_host = capture is None and not gpu.runs_on(device)
    if model.ranks.rows.size > 1 or (on_host and model.ranks.all.size > 1):
        return None
    if capture is None and device.type == "cuda":
        capture = CudaCapture(device)
    elif on_host and spec.experts is None:  # what experts call depends on the rows they are sent
        capture = host_capture(linears)
    if capture is None or not config.graph_bytes:
        return None
    buckets = Buckets(
        max_rows=min(config.graph_rows, host_rows(linears)) if on_host else config.graph_rows,
        minimum_rows=minimum_rows,
        fine=on_host and not all(linear.multiplies_tiles for linear in linears),
        always_nodes=on_host,
    )
    return ForwardGraphs(
        buckets,
        max_bytes=config.graph_bytes,
        capture=capture,
        device=device,
        ranks=model.ranks.tensor,
    )
