"""A target, and a draft, that say what was recorded.

Every product, norm and draw is done as ever; between the head and the draw, the recorded token
of a row's position is made certain. What follows from the tokens, the accept lengths foremost, is
then real, and so is the time. The draft cannot be real over random weights: it is told the recorded
token with a given probability, drawn anew at each position, and is as sure of a wrong one else.

Legend: R sampled rows, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from traces import Trace

from rollout.runner import Forwarded
from rollout.types import Batch, DraftTrees, Request
from spec_workers.neural.guesses import Guesser, Guesses
from spec_workers.target import TargetWorker

_CERTAIN = 1e4
"""Beside logits of order ten, at any temperature up to about a hundred."""


class Recording:
    """What each request is going to say: its sample index is a response of the trace."""

    def __init__(self, trace: Trace) -> None:
        self._responses = trace.responses

    def at(self, request: Request, position: int) -> int:
        """The recorded token at a position of the sequence; 0 beyond the end."""
        response = self._responses[request.sample_index]
        index = position - request.prompt_len
        return int(response[index]) if index < len(response) else 0


def force_target(target: TargetWorker, recording: Recording) -> None:
    """From now on every row's logits make the recorded next token certain."""
    verify = target.verify

    @torch.inference_mode()
    def forced(batch: Batch, trees: DraftTrees) -> Forwarded:
        forwarded = verify(batch, trees)
        tokens: list[int] = []
        for b, entry in enumerate(batch.entries):
            if entry.samples:
                first, last = int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])
                depths = [0, *trees.depths_N[first:last].tolist()]
                tokens += [recording.at(entry.request, entry.end + depth) for depth in depths]
        _make_certain(forwarded.logits_RV, tokens)
        return forwarded

    target.verify = forced  # type: ignore[method-assign]


def force_draft(guesser: Guesser, recording: Recording, hit_rate: float) -> None:
    """From now on the draft is sure of a token, which is the recorded one in ``hit_rate`` of all
    positions."""
    children = guesser.children

    def forced(
        guesses: Guesses,
        logits_RD: torch.Tensor,
        trees_R: NDArray[np.int64],
        depths_R: NDArray[np.int64],
    ) -> Any:
        tokens = []
        for tree, depth in zip(trees_R.tolist(), depths_R.tolist(), strict=True):
            entry = guesses.batch.entries[guesses.entries_G[tree]]
            position = entry.end + depth
            token = recording.at(entry.request, position)
            hits = np.random.default_rng((entry.request.request_id, position)).random() < hit_rate
            tokens.append(token if hits and token < logits_RD.shape[1] else 0)
        with torch.inference_mode():
            _make_certain(logits_RD, tokens)
        return children(guesses, logits_RD, trees_R, depths_R)

    guesser.children = forced  # type: ignore[method-assign]


def _make_certain(logits_RV: torch.Tensor, tokens_R: list[int]) -> None:
    rows = torch.arange(len(tokens_R), device=logits_RV.device)
    logits_RV[rows, torch.tensor(tokens_R, device=logits_RV.device)] = _CERTAIN
