"""The sampling inputs of a step's rows, as flat arrays that are sent to the device of the logits.

`row_inputs` and `tree_inputs` fill the records with numpy's arrays, `transfers.upload` makes
records of tensors of them.

Legend: A arrays or tensors; R rows, V vocabulary, C rows whose logits are changed, E edited logits,
X forbidden ones, T rows that are truncated, W rows that ask for extras, K tokens of a row, B
entries, N draft nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from rollout.ops.transfers import A
from rollout.sampling.rows import SampleRows
from rollout.types import DraftTrees, Request, SamplingParams


@dataclass(kw_only=True)
class Changes(Generic[A]):
    """Rows whose logits are changed, and how: edits by penalties and bias, and tokens that a row
    must not draw, below its minimum length or by its request's constraints."""

    rows_C: A  # int64, ascending
    places_R: A  # int64, a row's index in ``rows_C``, or -1
    edited_E: A  # int64, places in the flat logits [C, V], none twice
    edits_3E: A  # float32: a penalty to divide or multiply by, a cost to subtract, a bias to add
    forbidden_X: A  # int64, places in the flat logits


@dataclass(kw_only=True)
class Truncation(Generic[A]):
    """The cuts of all rows, as `ops.truncation` takes them."""

    top_k_R: A  # int64
    top_p_R: A  # float32
    min_p_R: A  # float32
    rows_T: A  # int64: the rows that truncate and whose logits are not changed


@dataclass(kw_only=True)
class WantedExtras(Generic[A]):
    """Rows whose requests asked for numbers beside ``logprobs``; int64."""

    raw_W: A
    sampling_W: A
    mask_W: A
    top_W: A
    ids_W: A
    entropy_W: A
    ids_WK: A  # tokens whose logprobs each row of ``ids_W`` wants, padded with token 0
    max_top: int  # tokens that any row of ``top_W`` wants


@dataclass(kw_only=True)
class TreeInputs(Generic[A]):
    """Draft trees as `ops.tree_accept` takes them."""

    row_offsets_B1: A  # int32
    tokens_N: A  # int32
    parents_N: A  # int32
    masks_N: A  # int64
    node_offsets_B1: A  # int32


@dataclass(kw_only=True)
class RowInputs(Generic[A]):
    """Inputs of a step's samples beside logits. A part that no row needs is None."""

    temperature_R: A  # float32
    seeds_R: A  # int64, the bits of the request seeds
    positions_R: A  # int64
    changes: Changes[A] | None
    truncation: Truncation[A] | None
    wanted: WantedExtras[A] | None
    trees: TreeInputs[A] | None
    chosen_R: A | None  # int64: the tokens to be scored, instead of drawing any


def row_inputs(
    rows: SampleRows,
    vocab: int,
    *,
    trees: TreeInputs[NDArray] | None = None,
    chosen: Sequence[int] | None = None,
) -> RowInputs[NDArray]:
    """The inputs of all rows, on the host.

    Args:
        vocab: logits of a row.
        trees: to be walked along the samples.
        chosen: see `RowInputs.chosen_R`.
    """
    params = [request.params for request in rows.owners]
    changes = _changes(rows, vocab) if any(_may_change(p) for p in params) else None
    return RowInputs(
        temperature_R=rows.per_row(np.array([p.temperature for p in params], dtype=np.float32)),
        seeds_R=rows.seeds_R.view(np.int64),
        positions_R=rows.positions_R,
        changes=changes,
        truncation=_truncation(rows, changes) if any(p.truncates for p in params) else None,
        wanted=_wanted(rows) if any(p.wants_extras for p in params) else None,
        trees=trees,
        chosen_R=None if chosen is None else np.array(chosen, dtype=np.int64),
    )


def tree_inputs(trees: DraftTrees, row_offsets_B1: NDArray[np.int64]) -> TreeInputs[NDArray]:
    """``row_offsets_B1``: entry b owns rows [offsets[b], offsets[b + 1])."""
    return TreeInputs(
        row_offsets_B1=row_offsets_B1.astype(np.int32),
        tokens_N=trees.tokens_N.astype(np.int32),
        parents_N=trees.parents_N.astype(np.int32),
        masks_N=trees.masks_N.view(np.int64),
        node_offsets_B1=trees.offsets_B1.astype(np.int32),
    )


def _truncation(rows: SampleRows, changes: Changes[NDArray] | None) -> Truncation[NDArray]:
    params = [request.params for request in rows.owners]
    truncates_R = rows.per_row(np.array([p.truncates for p in params], dtype=np.bool_))
    if changes is not None:
        truncates_R[changes.rows_C] = False
    return Truncation(
        top_k_R=rows.per_row(np.array([p.top_k for p in params], dtype=np.int64)),
        top_p_R=rows.per_row(np.array([p.top_p for p in params], dtype=np.float32)),
        min_p_R=rows.per_row(np.array([p.min_p for p in params], dtype=np.float32)),
        rows_T=np.flatnonzero(truncates_R),
    )


def _wanted(rows: SampleRows) -> WantedExtras[NDArray]:
    params = [request.params for request in rows.owners]

    def wanting(asked: list[bool]) -> NDArray[np.int64]:
        return np.flatnonzero(rows.per_row(np.array(asked, dtype=np.bool_)))

    max_ids = max(len(p.logprob_token_ids) for p in params)
    ids_OK = np.zeros((len(params), max_ids), dtype=np.int64)
    for owner, each in enumerate(params):
        ids_OK[owner, : len(each.logprob_token_ids)] = each.logprob_token_ids
    ids_W = wanting([bool(p.logprob_token_ids) for p in params])
    return WantedExtras(
        raw_W=wanting([p.raw_logprobs for p in params]),
        sampling_W=wanting([p.sampling_logprobs for p in params]),
        mask_W=wanting([p.sampling_mask for p in params]),
        top_W=wanting([p.top_logprobs > 0 for p in params]),
        ids_W=ids_W,
        ids_WK=np.repeat(ids_OK, rows.counts_O, axis=0)[ids_W],
        entropy_W=wanting([p.entropy for p in params]),
        max_top=max(p.top_logprobs for p in params),
    )


def _edits(params: SamplingParams) -> bool:
    return params.penalizes or bool(params.logit_bias)


def _may_change(params: SamplingParams) -> bool:
    return _edits(params) or params.forbids


def _changes(rows: SampleRows, vocab: int) -> Changes[NDArray] | None:
    requests = rows.owners
    is_edited_R = rows.per_row(np.array([_edits(r.params) for r in requests], dtype=np.bool_))
    may_stop_O = [r.prompt_len - r.partial_len + r.params.min_new_tokens for r in requests]
    is_short_R = rows.positions_R < rows.per_row(np.array(may_stop_O))
    is_constrained_R = rows.per_row(
        np.array([bool(r.constraints) for r in requests], dtype=np.bool_)
    )
    concerned = np.flatnonzero(is_edited_R | is_short_R | is_constrained_R).tolist()
    if not concerned:
        return None
    histories: dict[int, _History] = {}
    rows_C: list[int] = []
    edited, edits, forbidden = [_NO_TOKENS], [_NO_EDITS], [_NO_TOKENS]
    for row in concerned:
        request = rows.requests[row]
        first, tokens = len(rows_C) * vocab, _NO_TOKENS
        banned = [each.forbidden(request, rows.drafted[row]) for each in request.constraints]
        if is_edited_R[row]:
            history = histories.get(id(request))
            if history is None:
                history = histories[id(request)] = _History(request)
            tokens, edits_3E = history.edits(rows.drafted[row])
            edited.append(first + tokens)
            edits.append(edits_3E)
        if is_short_R[row]:
            stops = sorted(id for id in request.stop_check.stop_token_ids if id < vocab)
            banned.append(np.array(stops, dtype=np.int64))
        forbidden += [first + tokens_X for tokens_X in banned]
        if len(tokens) or any(map(len, banned)):
            rows_C.append(row)
    if not rows_C:
        return None
    places_R = np.full(len(rows.positions_R), -1)
    places_R[rows_C] = np.arange(len(rows_C))
    return Changes(
        rows_C=np.array(rows_C),
        places_R=places_R,
        edited_E=np.concatenate(edited),
        edits_3E=np.concatenate(edits, axis=1),
        forbidden_X=np.concatenate(forbidden),
    )


_NO_TOKENS = np.empty(0, dtype=np.int64)
_NO_EDITS = np.empty((3, 0), dtype=np.float32)


class _History:
    """The effect of a request's committed tokens on the logits of all of its rows in a step.

    Repetition (CTRL, Keskar et al. 2019, eq. 5 extended to negative logits by multiplication) looks
    at prompt and output; presence and frequency at output alone. All of it belongs to ``logprobs``:
    a trainer that applies the same transforms recomputes them.
    """

    def __init__(self, request: Request) -> None:
        self._params = params = request.params
        self._counts_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._seen = self._output = self._counts = _NO_TOKENS
        if self._counts_output:
            output = request.tokens[request.prompt_len - request.partial_len :]
            self._output, self._counts = _ascending(np.array(output, dtype=np.int64))
            self._seen = self._output
        if params.repetition_penalty != 1:
            self._seen, _ = _ascending(np.array(request.tokens, dtype=np.int64))
        self._biased = np.array(sorted(params.logit_bias), dtype=np.int64)
        self._biases = [params.logit_bias[token] for token in self._biased.tolist()]

    def edits(self, drafted: list[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ascending tokens and their edits [3, E]: penalty, cost and bias, of which 1, 0 and -0
        change nothing."""
        params, path = self._params, _NO_TOKENS
        if drafted and params.penalizes:
            path = np.array(drafted, dtype=np.int64)
        seen = _union(self._seen, path)
        tokens = _union(seen, self._biased) if len(seen) else self._biased
        edits_3E = np.empty((3, len(tokens)), dtype=np.float32)
        penalties_E, costs_E, biases_E = edits_3E
        penalties_E[:], costs_E[:], biases_E[:] = params.repetition_penalty, 0, -0.0
        if len(self._biased):
            penalties_E[:] = 1
            penalties_E[np.searchsorted(tokens, seen)] = params.repetition_penalty
            biases_E[np.searchsorted(tokens, self._biased)] = self._biases
        if self._counts_output:
            counts_E = np.zeros(len(tokens), dtype=np.int64)
            counts_E[np.searchsorted(tokens, self._output)] = self._counts
            np.add.at(counts_E, np.searchsorted(tokens, path), 1)
            with np.errstate(over="ignore"):
                often_E = params.frequency_penalty * counts_E.astype(np.float32)
                costs_E[:] = np.where(counts_E > 0, params.presence_penalty + often_E, 0)
        return tokens, edits_3E


def _ascending(tokens: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct tokens and their counts. Without counts numpy hashes, which is slower."""
    return np.unique(tokens, return_counts=True)


def _union(tokens: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distinct tokens of both in ascending order; ``tokens`` are that already."""
    return _ascending(np.concatenate([tokens, others]))[0] if len(others) else tokens
