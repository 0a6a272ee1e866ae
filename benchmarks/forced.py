"""A trace forced through an engine: its target, and a draft, say what was recorded.

Every product, norm and draw is done as ever; between the head and the draw, the recorded token of a
row's position is made certain. What follows from the tokens, the accept lengths foremost, is then
real, and so is the time. The draft cannot be real over random weights: it is told the recorded
token with a given probability, drawn anew at each position, and is as sure of a wrong one else.

Legend: G trees, L levels, R rows of logits, D draft vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness.traces import Trace
from numpy.typing import NDArray

from rollout import RolloutEngine, SamplingParams
from rollout.ops.transfers import upload
from rollout.ops.uniforms.reference import noise
from rollout.runner.model_runner import Forwarded
from rollout.types import Batch, DraftTrees, Request
from spec_workers.neural.drafter import NeuralDrafter
from spec_workers.neural.guesses import Tensors
from spec_workers.neural.tree_proposer import Shape, TreesToGrow
from spec_workers.target import TargetWorker

_CERTAIN = 1e4
"""Beside logits of order ten, at any temperature up to about a hundred."""


class Recording:
    """The future of each request: its sample index is a response of the trace."""

    def __init__(self, trace: Trace) -> None:
        self._responses = trace.responses

    def at(self, request: Request, position: int) -> int:
        """The recorded token at a position of the sequence; 0 beyond the end."""
        response = self._responses[request.sample_index]
        index = position - request.prompt_len
        return int(response[index]) if index < len(response) else 0

    def sampled(self, batch: Batch, trees: DraftTrees) -> list[int]:
        """The token that is next at every node of a step's trees, the roots first."""
        tokens: list[int] = []
        for b, entry in enumerate(batch.entries):
            if entry.samples:
                first, last = int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])
                depths = [0, *trees.depths_N[first:last].tolist()]
                tokens += [self.at(entry.request, entry.end + depth) for depth in depths]
        return tokens


def force_target(target: TargetWorker, recording: Recording) -> None:
    """Make the recorded next token certain in every row's logits, from now on."""
    forward = target.runner.forward

    def forced(
        batch: Batch,
        trees: DraftTrees,
        take_logits: Callable[[torch.Tensor], object],
        **options: Any,
    ) -> Forwarded:
        tokens_R = np.array(recording.sampled(batch, trees), dtype=np.int64)
        first = 0

        def take(logits_RV: torch.Tensor) -> None:
            nonlocal first
            _make_certain(logits_RV, tokens_R[first : first + len(logits_RV)])
            first += len(logits_RV)
            take_logits(logits_RV)

        return forward(batch, trees, take, **options)

    target.runner.forward = forced  # type: ignore[method-assign]


def force_draft(drafter: NeuralDrafter, recording: Recording, hit_rate: float) -> None:
    """Replace a draft's guesses by one sure token, the recorded one in ``hit_rate`` of all
    positions."""

    def said(requests: Sequence[Request], positions_R: NDArray[np.int64]) -> NDArray[np.int64]:
        ids_R = np.array([request.request_id for request in requests], dtype=np.uint64)
        places = zip(requests, positions_R.tolist(), strict=True)
        recorded_R = np.array([recording.at(*place) for place in places], dtype=np.int64)
        return np.where(noise(ids_R, positions_R) < hit_rate, recorded_R, 0)

    proposer, guesser = drafter._proposer, drafter._guesser
    inputs, children = proposer._inputs, guesser.children

    def with_said(wanted: TreesToGrow, shape: Shape) -> dict[str, NDArray]:
        """Sends the recorded tokens of all depths along: on a GPU levels are launched without a
        read between."""
        entries = [wanted.batch.entries[b] for b in wanted.entries_G]
        ends_G = np.array([entry.end for entry in entries], dtype=np.int64)
        said_GL = np.zeros((shape.trees, proposer._num_steps), dtype=np.int64)
        for depth in range(proposer._num_steps):
            said_G = said([entry.request for entry in entries], ends_G + depth)
            said_GL[: len(entries), depth] = said_G
        return {"said": said_GL} | inputs(wanted, shape)

    def forced(
        logits_RD: torch.Tensor, tensors: Tensors, trees_R: torch.Tensor, level: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        said_R1 = tensors["said"][trees_R, level][:, None] % logits_RD.shape[1]
        certain_RD = logits_RD.scatter(1, said_R1, _CERTAIN)
        return children(certain_RD, tensors, trees_R, level)

    proposer._inputs = with_said  # type: ignore[method-assign]
    guesser.children = forced  # type: ignore[assignment,method-assign]


def _make_certain(logits_RV: torch.Tensor, tokens_R: NDArray[np.int64]) -> None:
    """Raise one logit of each row, without waiting for the device's work before it."""
    if not tokens_R.size:
        return
    sent = upload({"tokens": tokens_R}, logits_RV.device)
    logits_RV.scatter_(1, sent["tokens"][:, None], _CERTAIN)


def waves(trace: Trace, active: int, limit: int | None) -> list[list[int]]:
    """Responses that run together: the trace's steps, joined until there are ``active`` of them."""
    found: list[list[int]] = [[]]
    for step in trace.steps:
        if len(found[-1]) >= active:
            found.append([])
        found[-1] += step
    return found[:limit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    seconds: float
    running: int
    tokens: int
    forwards: int  # requests sampled from
    is_warm: bool


def steps(engine: RolloutEngine, trace: Trace, wave: list[int]) -> Iterator[Step]:
    """Run the responses of a wave together, on an engine whose target is forced.

    Raises RuntimeError where a rollout is not the recorded one.
    """
    for response in wave:
        prompt = int(trace.prompt_of_R[response])
        length = len(trace.responses[response])
        engine.submit(
            trace.prompts[prompt].tolist(),
            SamplingParams(max_new_tokens=length, ignore_eos=True),
            prompt_index=prompt,
            sample_index=response,
        )
    while engine.has_unfinished:
        started = time.perf_counter()
        ended = engine.step()
        seconds = time.perf_counter() - started
        for rollout in ended:
            if rollout.token_ids != trace.responses[rollout.sample_index].tolist():
                raise RuntimeError(f"response {rollout.sample_index} is not the recorded one")
        last = engine.last_step
        yield Step(
            seconds=seconds,
            running=last.running,
            tokens=last.generated_tokens,
            forwards=last.sampling,
            is_warm=_is_warm(engine),
        )


def _is_warm(engine: RolloutEngine) -> bool:
    """Whether the last step's timing is steady-state."""
    worker: Any = engine.worker
    graphs = worker.target.graphs
    return worker.drafting_is_steady and (graphs is None or graphs.is_warm)


def new_policy(engine: RolloutEngine, number: int) -> None:
    """Drafts see that the policy moved; one norm is sent again, which changes nothing."""
    worker: Any = engine.worker
    norm = worker.target.model.weight_loaders()["model.norm.weight"]
    tensors = [("model.norm.weight", norm.read())]
    engine.update_weights_from_tensor(tensors, weight_version=number + 2, partial=True)
