"""The sampler on a GPU: one copy there, a few kernels, one copy back.

The functions of `sampler` with the same arguments and results, and `tree_sampling`'s walk. Nothing
waits for the device but the read at the end; how many rows need what is known on the host.

Legend: R rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import tree_accept
from rollout.ops.categorical import categorical, entropy, token_logprobs
from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms import uniforms
from rollout.sampling.row_inputs import Wanted, noise_arrays, shape_arrays, tree_arrays
from rollout.sampling.rows import SampleRows
from rollout.sampling.sampled import Sampled
from rollout.transfers import Download, download, upload
from rollout.types import NO_EXTRAS, DraftTrees, TokenExtras

Tensors = dict[str, torch.Tensor]


def sample(logits_RV: torch.Tensor, rows: SampleRows) -> Sampled:
    wanted = Wanted.of(rows)
    arrays = noise_arrays(rows) | shape_arrays(rows) | wanted.arrays()
    drawn = _draw(logits_RV, upload(arrays, logits_RV.device), wanted)
    return _sampled(download(drawn), rows, wanted)


def score(logits_RV: torch.Tensor, rows: SampleRows, token_ids: list[int]) -> Sampled:
    wanted = Wanted.of(rows)
    arrays = shape_arrays(rows) | wanted.arrays()
    arrays["chosen"] = np.array(token_ids, dtype=np.int64)
    inputs = upload(arrays, logits_RV.device)
    shaped = _Shaped(logits_RV, inputs)
    tokens_R = inputs["chosen"]
    found = {"tokens": tokens_R, "logprobs": shaped.logprobs(tokens_R)}
    found |= shaped.extras(tokens_R, wanted.most)
    return _sampled(download(found), rows, wanted)


class SampledTrees:
    """A sample at every row, and the accepted nodes of each entry's tree, on their way back."""

    def __init__(
        self,
        logits_RV: torch.Tensor,
        rows: SampleRows,
        trees: DraftTrees,
        row_offsets_B1: NDArray[np.int64],
    ) -> None:
        self._rows = rows
        self._wanted = wanted = Wanted.of(rows)
        arrays = noise_arrays(rows) | shape_arrays(rows) | wanted.arrays()
        if trees.num_nodes:
            arrays |= tree_arrays(trees, row_offsets_B1)
        inputs = upload(arrays, logits_RV.device)
        found = _draw(logits_RV, inputs, wanted)
        if trees.num_nodes:
            found["paths"], found["lengths"] = tree_accept.accept(
                found["tokens"],
                inputs["row_offsets"],
                inputs["tokens"],
                inputs["parents"],
                inputs["masks"],
                inputs["node_offsets"],
            )
        self._num_entries = len(row_offsets_B1) - 1
        self._found = Download(found)

    def read(self) -> tuple[Sampled, list[list[int]]]:
        """Waits for them, and for nothing that was launched later."""
        read = self._found.read()
        if "paths" not in read:  # trees of nothing but roots
            walked: list[list[int]] = [[] for _ in range(self._num_entries)]
        else:
            lengths_B = read["lengths"]
            paths = read["paths"][:, : lengths_B.max(initial=0)].tolist()
            walked = [path[:end] for path, end in zip(paths, lengths_B.tolist(), strict=True)]
        return _sampled(read, self._rows, self._wanted), walked


def _draw(logits_RV: torch.Tensor, inputs: Tensors, wanted: Wanted) -> Tensors:
    shaped = _Shaped(logits_RV, inputs)
    tokens_R, logprobs_R = shaped.draw(uniforms(inputs["seeds"], inputs["positions"]))
    found = {"tokens": tokens_R, "logprobs": logprobs_R}
    return found | shaped.extras(tokens_R, wanted.most)


class _Shaped:
    """Logits with what was asked of them: see `row_inputs.shape_arrays`."""

    def __init__(self, logits_RV: torch.Tensor, inputs: Tensors) -> None:
        self._raw_RV = logits_RV
        self._inputs = inputs
        self._temperature_R = inputs["temperature"]
        self._logits_RV = _edited(logits_RV, inputs) if "edit_rows" in inputs else logits_RV
        self._drawn_from_RV = self._logits_RV
        if "banned_rows" in inputs:
            self._drawn_from_RV = self._logits_RV.clone()
            place = (inputs["banned_rows"], inputs["banned_tokens"])
            self._drawn_from_RV[place] = float("-inf")
        self._threshold_R: torch.Tensor | None = None
        if "top_k" in inputs:
            self._threshold_R = truncation_threshold(
                self._drawn_from_RV.float(),
                self._temperature_R,
                inputs["top_k"],
                inputs["top_p"],
                inputs["min_p"],
            )

    def draw(self, uniforms_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_R, logprobs_R = categorical(
            self._drawn_from_RV, self._temperature_R, uniforms_R, self._threshold_R
        )
        if self._drawn_from_RV is not self._logits_RV:
            logprobs_R = self.logprobs(tokens_R)
        return tokens_R, logprobs_R

    def logprobs(self, tokens_R: torch.Tensor) -> torch.Tensor:
        return token_logprobs(self._logits_RV, self._temperature_R, tokens_R)

    def extras(self, tokens_R: torch.Tensor, most: int) -> Tensors:
        """What was wanted about the token of each row; ``most``: likeliest tokens of a row."""
        inputs, found = self._inputs, Tensors()
        if "wants_raw" in inputs:
            index = inputs["wants_raw"]
            at_one = torch.ones_like(self._temperature_R[index])
            found["raw"] = token_logprobs(self._raw_RV[index], at_one, tokens_R[index])
        if "wants_sampling" in inputs:
            index = inputs["wants_sampling"]
            kept_RV = self._drawn_from_RV[index].float()
            if self._threshold_R is not None:
                cut_RV = kept_RV < self._threshold_R[index][:, None]
                kept_RV = kept_RV.masked_fill(cut_RV, float("-inf"))
            found["sampling"] = token_logprobs(kept_RV, self._temperature_R[index], tokens_R[index])
        if "wants_top" in inputs:
            index = inputs["wants_top"]
            logits = self._logits_RV[index]
            ids_RK = logits.float().topk(min(most, logits.shape[1]), dim=1).indices
            found["top_ids"] = ids_RK
            found["top_values"] = token_logprobs(logits, self._temperature_R[index], ids_RK)
        if "wants_entropy" in inputs:
            index = inputs["wants_entropy"]
            found["entropies"] = entropy(self._logits_RV[index], self._temperature_R[index])
        return found


def _edited(logits_RV: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """A float32 copy with penalties, costs and biases applied, in that order."""
    edited_RV = logits_RV.to(torch.float32, copy=True)
    place = (inputs["edit_rows"], inputs["edit_tokens"])
    values = edited_RV[place]
    penalties = inputs["penalties"]
    values = _bounded(values, torch.where(values > 0, values / penalties, values * penalties))
    values = _bounded(values, values - inputs["costs"])
    edited_RV[place] = _bounded(values, values + inputs["biases"])
    return edited_RV


def _bounded(values: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """What was finite stays so, as in `penalties`."""
    largest = torch.finfo(torch.float32).max
    return torch.where(values.isfinite(), changed.clamp(-largest, largest), changed)


def _sampled(read: dict[str, NDArray], rows: SampleRows, wanted: Wanted) -> Sampled:
    extras = [NO_EXTRAS] * len(read["tokens"])
    for row in {*wanted.raw, *wanted.sampling, *wanted.entropy, *wanted.top}:
        extras[row] = TokenExtras()
    for row, value in zip(wanted.raw, _listed(read, "raw"), strict=True):
        extras[row].raw_logprobs = [value]
    for row, value in zip(wanted.sampling, _listed(read, "sampling"), strict=True):
        extras[row].sampling_logprobs = [value]
    for row, value in zip(wanted.entropy, _listed(read, "entropies"), strict=True):
        extras[row].entropies = [value]
    top = zip(wanted.top, _listed(read, "top_ids"), _listed(read, "top_values"), strict=True)
    for row, ids, values in top:
        count = rows.requests[row].params.top_logprobs
        extras[row].top_logprobs = [list(zip(ids[:count], values[:count], strict=True))]
    return Sampled(
        tokens=read["tokens"].tolist(), logprobs=read["logprobs"].tolist(), extras=extras
    )


def _listed(read: dict[str, NDArray], name: str) -> list:
    return read[name].tolist() if name in read else []
