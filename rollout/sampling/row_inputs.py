"""The sampling inputs of a step's rows, as flat arrays: all that a device is told of them.

Legend: R rows, C rows whose logits are changed, E edited logits, X forbidden ones, T rows that are
truncated, B entries, N draft nodes, W rows that want something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.sampling.penalties import changes_logits
from rollout.sampling.rows import SampleRows
from rollout.types import DraftTrees, Request, SamplingParams

Arrays = dict[str, NDArray]


def noise_arrays(rows: SampleRows) -> Arrays:
    """``seeds``, ``positions``: int64 [R], of which the noise is made."""
    return {"seeds": rows.seeds_R.view(np.int64), "positions": rows.positions_R}


def shape_arrays(rows: SampleRows) -> Arrays:
    """How logits become a distribution; what no row asks for is not there.

    ``temperature``: float32 [R]. ``changed``: int64 [C], rows whose logits are changed, ascending;
    ``changed_place``: int64 [R], a row's place among them or -1. Edits of their logits by penalties
    and bias: ``edit_rows``, such places, and ``edit_tokens``, int64 [E], no pair twice, with
    ``penalties``, ``costs`` and ``biases``, float32 [E]. Tokens that a row below its minimum length
    must not draw: ``banned_rows``, such places, and ``banned_tokens``, int64 [X].

    ``top_k``: int64, ``top_p`` and ``min_p``: float32 [R]. ``truncated``: int64 [T], the rows of
    which they cut something, but for the changed ones.
    """
    params = [request.params for request in rows.owners]

    def of_rows(values: list, dtype: type) -> NDArray:
        return rows.of_rows(np.array(values, dtype=dtype))

    arrays: Arrays = {"temperature": of_rows([p.temperature for p in params], np.float32)}
    edits, banned = _edits(rows), _banned(rows)
    is_changed_R = np.zeros(len(arrays["temperature"]), dtype=bool)
    for changes, name in ((edits, "edit_rows"), (banned, "banned_rows")):
        is_changed_R[changes.get(name, [])] = True
    if is_changed_R.any():
        arrays["changed"] = np.flatnonzero(is_changed_R)
        arrays["changed_place"] = np.where(is_changed_R, is_changed_R.cumsum() - 1, -1)
        for changes, name in ((edits, "edit_rows"), (banned, "banned_rows")):
            if changes:
                changes[name] = arrays["changed_place"][changes[name]]
    if any(p.truncates for p in params):
        arrays["top_k"] = of_rows([p.top_k for p in params], np.int64)
        arrays["top_p"] = of_rows([p.top_p for p in params], np.float32)
        arrays["min_p"] = of_rows([p.min_p for p in params], np.float32)
        truncates_R = of_rows([p.truncates for p in params], np.bool_)
        arrays["truncated"] = np.flatnonzero(truncates_R & ~is_changed_R)
    return arrays | edits | banned


def tree_arrays(trees: DraftTrees, row_offsets_B1: NDArray[np.int64]) -> Arrays:
    """The trees as ``ops.tree_accept.accept`` takes them."""
    return {
        "row_offsets": row_offsets_B1.astype(np.int32),
        "tokens": trees.tokens_N.astype(np.int32),
        "parents": trees.parents_N.astype(np.int32),
        "masks": trees.masks_N.view(np.int64),
        "node_offsets": trees.offsets_B1.astype(np.int32),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedExtras:
    """Which rows' requests asked for which of the numbers beside ``logprobs``."""

    raw: list[int]
    sampling: list[int]
    top: list[int]
    most: int  # tokens that any of those wants
    entropy: list[int]

    @staticmethod
    def of(rows: SampleRows) -> RequestedExtras:
        if not any(request.params.wants_extras for request in rows.owners):
            return _NOTHING
        params: list[SamplingParams] = [request.params for request in rows.requests]
        top = [r for r, p in enumerate(params) if p.top_logprobs]
        return RequestedExtras(
            raw=[r for r, p in enumerate(params) if p.raw_logprobs],
            sampling=[r for r, p in enumerate(params) if p.sampling_logprobs],
            top=top,
            most=max((params[r].top_logprobs for r in top), default=0),
            entropy=[r for r, p in enumerate(params) if p.entropy],
        )

    def __bool__(self) -> bool:
        """Whether anybody asked for anything."""
        return self is not _NOTHING

    def arrays(self) -> Arrays:
        """int64 [W], by the names ``wants_raw``, ``wants_sampling``, ``wants_top`` and
        ``wants_entropy``; what nobody wants is not there."""
        listed = {
            "wants_raw": self.raw,
            "wants_sampling": self.sampling,
            "wants_top": self.top,
            "wants_entropy": self.entropy,
        }
        return {name: np.array(own, dtype=np.int64) for name, own in listed.items() if own}


_NOTHING = RequestedExtras(raw=[], sampling=[], top=[], most=0, entropy=[])


def _edits(rows: SampleRows) -> Arrays:
    if not any(changes_logits(request.params) for request in rows.owners):
        return {}
    histories: dict[int, _History] = {}
    found = []
    for row, request in enumerate(rows.requests):
        if not changes_logits(request.params):
            continue
        history = histories.get(id(request))
        if history is None:
            history = histories[id(request)] = _History(request)
        found.append((row, *history.edits(rows.drafted[row])))
    if not found:
        return {}
    counts = [len(tokens) for _, tokens, *_ in found]
    return {
        "edit_rows": np.repeat(np.array([row for row, *_ in found], dtype=np.int64), counts),
        "edit_tokens": np.concatenate([tokens for _, tokens, _, _, _ in found]),
        "penalties": np.concatenate([penalties for _, _, penalties, _, _ in found]),
        "costs": np.concatenate([costs for _, _, _, costs, _ in found]),
        "biases": np.concatenate([biases for _, _, _, _, biases in found]),
    }


class _History:
    """The effect of a request's committed tokens on the logits of all of its rows in a step."""

    def __init__(self, request: Request) -> None:
        self._params = request.params
        committed = np.array(request.tokens, dtype=np.int64)
        first_output = request.prompt_len - request.partial_len
        self._output, self._counts = np.unique(committed[first_output:], return_counts=True)
        self._seen = np.unique(committed) if self._params.repetition_penalty != 1 else self._output
        self._biased = np.array(sorted(self._params.logit_bias), dtype=np.int64)

    def edits(self, drafted: list[int]) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """Tokens, ascending, with their penalty to divide or multiply by, cost and bias.

        The same float32 operations as `penalties.apply_history_`, of which those without effect are
        a division by one and an addition of nothing.
        """
        params = self._params
        path = np.array(drafted, dtype=np.int64)
        seen = np.union1d(self._seen, path) if params.penalizes else path[:0]
        tokens = np.union1d(seen, self._biased)
        penalties = np.ones(len(tokens), dtype=np.float32)
        penalties[np.searchsorted(tokens, seen)] = params.repetition_penalty
        costs = np.zeros(len(tokens), dtype=np.float32)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            counts = np.zeros(len(tokens), dtype=np.int64)
            counts[np.searchsorted(tokens, self._output)] = self._counts
            np.add.at(counts, np.searchsorted(tokens, path), 1)
            with np.errstate(over="ignore"):
                often = params.frequency_penalty * counts.astype(np.float32)
                cost = params.presence_penalty + often
            costs = np.where(counts > 0, cost, 0).astype(np.float32)
        biases = np.zeros(len(tokens), dtype=np.float32)
        places = np.searchsorted(tokens, self._biased)
        biases[places] = [params.logit_bias[token] for token in self._biased.tolist()]
        return tokens, penalties, costs, biases


def _banned(rows: SampleRows) -> Arrays:
    if not any(request.params.min_new_tokens for request in rows.owners):
        return {}
    found_rows: list[int] = []
    tokens: list[int] = []
    for row, request in enumerate(rows.requests):
        if rows.generated_len(row) < request.params.min_new_tokens:
            stops = sorted(request.stop_check.stop_token_ids)
            found_rows += [row] * len(stops)
            tokens += stops
    if not tokens:
        return {}
    return {
        "banned_rows": np.array(found_rows, dtype=np.int64),
        "banned_tokens": np.array(tokens, dtype=np.int64),
    }
