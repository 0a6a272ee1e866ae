"""Logits to tokens and logprobs, each row a pure function of its logits, params, seed and position.

At every tree node the target samples its own next token. The walk from the root follows the child
that equals that sample and stops where there is none, so what is emitted is always the target's
own sample: the draft decides how many samples one forward yields and nothing else.

On a GPU there is one copy to it, a few kernels and one copy back. Only the read at the end waits,
because the host knows how many rows need which numbers.

Legend: R rows, V vocabulary, W rows that ask for extras, K tokens of a row, M words of bits, B
entries, D places of a path; A arrays or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import tree_accept
from rollout.ops.transfers import A, Download, upload
from rollout.ops.uniforms import uniforms
from rollout.sampling.row_inputs import (
    RowInputs,
    TreeInputs,
    WantedExtras,
    row_inputs,
    tree_inputs,
)
from rollout.sampling.rows import SampleRows, sample_rows
from rollout.sampling.shaped_logits import ShapedLogits
from rollout.types import NO_EXTRAS, Batch, DraftTrees, TokenExtras


@dataclass(kw_only=True, slots=True)
class Sampled:
    """The sample of each row. A row without a distribution has token -1."""

    tokens: list[int]
    logprobs: list[float]
    extras: list[TokenExtras]  # per row, each list of length one or empty; maybe NO_EXTRAS


@dataclass(kw_only=True, slots=True)
class TreeSamples:
    """The samples of a step, and the nodes of its draft trees that they accept."""

    sampled: Sampled  # at each entry's root, then at its nodes
    offsets_B1: NDArray[np.int64]  # entry b owns rows [offsets[b], offsets[b + 1]) of those
    paths: list[list[int]]  # each entry's accepted nodes, in tree numbering and path order


class TreeSampler:
    """Samples at every root and node of a step, and walks each tree."""

    def __init__(self, batch: Batch, trees: DraftTrees) -> None:
        self._batch = batch
        self._trees = trees
        self._sampler: Sampler | None = None
        self._offsets_B1 = np.zeros(1, dtype=np.int64)

    def take(self, logits_RV: torch.Tensor) -> None:
        """Sample the next rows; see `Sampler.take`. The first call lays them out, while a GPU
        computes."""
        if self._sampler is None:
            rows, self._offsets_B1 = sample_rows(self._batch, self._trees)
            trees = tree_inputs(self._trees, self._offsets_B1) if self._trees.num_nodes else None
            self._sampler = Sampler(rows, trees=trees)
        self._sampler.take(logits_RV)

    def read(self) -> TreeSamples:
        """Wait for the samples, and for nothing that was launched later."""
        assert self._sampler is not None, "logits come first"
        sampled, paths = self._sampler.read(), self._sampler.read_paths()
        if paths is None:  # trees of nothing but roots
            paths = [[] for _ in range(len(self._offsets_B1) - 1)]
        return TreeSamples(sampled=sampled, offsets_B1=self._offsets_B1, paths=paths)


@dataclass(kw_only=True)
class SampleOutputs(Generic[A]):
    """The outputs that are read of a step's samples; those that nobody asked for are None. Filled
    by `_computed`, the last two by `Sampler`."""

    tokens_R: A  # int64; -1: the row is no distribution
    logprobs_R: A  # float32, and so are all others but ids
    raw_W: A | None = None
    sampling_W: A | None = None
    masks_WM: A | None = None  # int32, 32 tokens in a word
    top_ids_WK: A | None = None  # int64
    top_logprobs_WK: A | None = None
    ids_logprobs_WK: A | None = None
    entropies_W: A | None = None
    paths_BD: A | None = None  # see `tree_accept.accept`
    lengths_B: A | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows whose logits have come."""

    rows: SampleRows
    wanted: WantedExtras[NDArray] | None
    outputs: Download


class Sampler:
    """Samples the rows of one step, or scores given tokens. Their logits come in blocks."""

    def __init__(
        self,
        rows: SampleRows,
        *,
        trees: TreeInputs[NDArray] | None = None,
        chosen: list[int] | None = None,
    ) -> None:
        """
        Args:
            trees: that are walked along the samples.
            chosen: the tokens to be scored, bit for bit as if they had been drawn; default: each
                row draws its own.
        """
        self._rows = rows
        self._trees = trees
        self._sent_trees: TreeInputs[torch.Tensor] | None = None
        self._chosen = chosen
        self._blocks: list[_Block] = []
        self._tokens: list[torch.Tensor] = []  # int64 [R] of each block

    def take(self, logits_RV: torch.Tensor) -> None:
        """Launch the sampling of the next rows, as many as there are logits.

        Args:
            logits_RV: as the model gave them, any float dtype. A row without a distribution (NaN,
                +inf, nothing above -inf) gives token -1.
        """
        first = sum(map(len, self._tokens))
        last = first + len(logits_RV)
        if not len(logits_RV):
            return
        rows = self._rows if last - first == len(self._rows) else self._rows.part(first, last)
        inputs = row_inputs(
            rows,
            logits_RV.shape[1],
            trees=None if self._blocks else self._trees,
            chosen=None if self._chosen is None else self._chosen[first:last],
        )
        sent: RowInputs[torch.Tensor] = upload(inputs, logits_RV.device)
        outputs = _computed(logits_RV, sent)
        self._tokens.append(outputs.tokens_R)
        self._sent_trees = self._sent_trees or sent.trees
        if self._sent_trees is not None and last == len(self._rows):
            outputs.paths_BD, outputs.lengths_B = self._accepted(self._sent_trees)
        self._blocks.append(_Block(rows, inputs.wanted, Download(outputs)))

    def _accepted(self, trees: TreeInputs[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return tree_accept.accept(
            self._tokens[0] if len(self._tokens) == 1 else torch.cat(self._tokens),
            trees.row_offsets_B1,
            trees.tokens_N,
            trees.parents_N,
            trees.masks_N,
            trees.node_offsets_B1,
        )

    def read(self) -> Sampled:
        """Waits for the samples, and for nothing that was launched later."""
        found = Sampled(tokens=[], logprobs=[], extras=[])
        for block in self._blocks:
            outputs: SampleOutputs[NDArray] = block.outputs.read()
            found.tokens += outputs.tokens_R.tolist()
            found.logprobs += outputs.logprobs_R.tolist()
            found.extras += _extras(block.rows, block.wanted, outputs)
        return found

    def read_paths(self) -> list[list[int]] | None:
        """Each entry's accepted nodes; None without trees."""
        if not self._blocks:
            return None
        read: SampleOutputs[NDArray] = self._blocks[-1].outputs.read()
        if read.paths_BD is None or read.lengths_B is None:
            return None
        lengths = read.lengths_B.tolist()
        paths = read.paths_BD[:, : max(lengths, default=0)].tolist()
        return [path[:length] for path, length in zip(paths, lengths, strict=True)]


def _extras(
    rows: SampleRows, wanted: WantedExtras[NDArray] | None, read: SampleOutputs[NDArray]
) -> list[TokenExtras]:
    extras = [NO_EXTRAS] * len(rows)
    if wanted is None:
        return extras
    for row, request in enumerate(rows.requests):
        if request.params.wants_extras:
            extras[row] = TokenExtras()
    for row, value in _pairs(wanted.raw_W, read.raw_W):
        extras[row].raw_logprobs = [value]
    for row, value in _pairs(wanted.sampling_W, read.sampling_W):
        extras[row].sampling_logprobs = [value]
    for row, value in _pairs(wanted.entropy_W, read.entropies_W):
        extras[row].entropies = [value]
    for row, values in _pairs(wanted.ids_W, read.ids_logprobs_WK):
        asked = rows.requests[row].params.logprob_token_ids
        extras[row].token_ids_logprobs = [list(zip(asked, values, strict=False))]
    if read.masks_WM is not None:
        for row, words_M in zip(wanted.mask_W.tolist(), read.masks_WM, strict=True):
            extras[row].sampling_masks = [_set_bits(words_M)]
    top = zip(
        _pairs(wanted.top_W, read.top_ids_WK),
        _pairs(wanted.top_W, read.top_logprobs_WK),
        strict=True,
    )
    for (row, ids), (_, values) in top:
        count = rows.requests[row].params.top_logprobs
        extras[row].top_logprobs = [list(zip(ids[:count], values[:count], strict=True))]
    return extras


def _pairs(rows_W: NDArray, values_W: NDArray | None) -> list[tuple[int, Any]]:
    return [] if values_W is None else list(zip(rows_W.tolist(), values_W.tolist(), strict=True))


def _set_bits(words_M: NDArray[np.int32]) -> list[int]:
    """The places of the bits that are set, ascending; most words have none."""
    bytes_N = np.ascontiguousarray(words_M).view(np.uint8)
    used = np.flatnonzero(bytes_N)
    bits = np.unpackbits(bytes_N[used], bitorder="little").reshape(-1, 8)
    byte, bit = np.nonzero(bits)
    return (used[byte] * 8 + bit).tolist()


def _computed(
    logits_RV: torch.Tensor, inputs: RowInputs[torch.Tensor]
) -> SampleOutputs[torch.Tensor]:
    shaped, wanted = ShapedLogits(logits_RV, inputs), inputs.wanted
    if inputs.chosen_R is None:
        tokens_R, logprobs_R = shaped.draw(uniforms(inputs.seeds_R, inputs.positions_R))
    else:
        tokens_R, logprobs_R = inputs.chosen_R, shaped.logprobs(inputs.chosen_R)
    found = SampleOutputs(tokens_R=tokens_R, logprobs_R=logprobs_R)
    if wanted is None:
        return found
    if len(wanted.raw_W):
        found.raw_W = shaped.raw_logprobs(tokens_R, wanted.raw_W)
    if len(wanted.sampling_W):
        found.sampling_W = shaped.sampling_logprobs(tokens_R, wanted.sampling_W)
    if len(wanted.mask_W):
        found.masks_WM = shaped.sampling_masks(wanted.mask_W)
    if len(wanted.ids_W):
        found.ids_logprobs_WK = shaped.logprobs_of(wanted.ids_WK, wanted.ids_W)
    if len(wanted.top_W):
        found.top_ids_WK, found.top_logprobs_WK = shaped.top_logprobs(wanted.top_W, wanted.max_top)
    if len(wanted.entropy_W):
        found.entropies_W = shaped.entropies(wanted.entropy_W)
    return found
