"""The sampler on a GPU: one copy there, a few kernels, one copy back.

The functions of `sampler` with the same arguments and results, and `tree_sampling`'s walk. Nothing
waits for the device but the read at the end; how many rows need what is known on the host.

A row's logits stay in the model's dtype unless its own parameters change them, so that no row is
computed otherwise because of its company, and no batch is copied as float32 for the sake of one.

Legend: R rows, C rows whose logits are changed, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import tree_accept
from rollout.ops.categorical import categorical, entropy, token_logprobs
from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms import uniforms
from rollout.runner.transfers import Download, download, upload
from rollout.sampling.likeliest import likeliest
from rollout.sampling.row_inputs import RequestedExtras, noise_arrays, shape_arrays, tree_arrays
from rollout.sampling.rows import SampleRows
from rollout.sampling.sampled import Sampled
from rollout.types import NO_EXTRAS, DraftTrees, TokenExtras

Tensors = dict[str, torch.Tensor]


def sample(logits_RV: torch.Tensor, rows: SampleRows) -> Sampled:
    wanted = RequestedExtras.of(rows)
    arrays = noise_arrays(rows) | shape_arrays(rows) | wanted.arrays()
    drawn = _draw(logits_RV, upload(arrays, logits_RV.device), wanted)
    return _sampled(download(drawn), rows, wanted)


def score(logits_RV: torch.Tensor, rows: SampleRows, token_ids: list[int]) -> Sampled:
    wanted = RequestedExtras.of(rows)
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
        self._wanted = wanted = RequestedExtras.of(rows)
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
            lengths = read["lengths"].tolist()
            paths = read["paths"][:, : max(lengths, default=0)].tolist()
            walked = [path[:end] for path, end in zip(paths, lengths, strict=True)]
        return _sampled(read, self._rows, self._wanted), walked


def _draw(logits_RV: torch.Tensor, inputs: Tensors, wanted: RequestedExtras) -> Tensors:
    shaped = _Shaped(logits_RV, inputs)
    tokens_R, logprobs_R = shaped.draw(uniforms(inputs["seeds"], inputs["positions"]))
    found = {"tokens": tokens_R, "logprobs": logprobs_R}
    return found | shaped.extras(tokens_R, wanted.most)


class _Rows:
    """Rows of logits, and what is drawn from instead where tokens are forbidden."""

    def __init__(
        self,
        logits_RV: torch.Tensor,
        drawn_from_RV: torch.Tensor,
        temperature_R: torch.Tensor,
        threshold_R: torch.Tensor | None,
    ) -> None:
        self.logits_RV = logits_RV
        self.drawn_from_RV = drawn_from_RV
        self.threshold_R = threshold_R
        self._temperature_R = temperature_R

    def draw(self, uniforms_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_R, logprobs_R = categorical(
            self.drawn_from_RV, self._temperature_R, uniforms_R, self.threshold_R
        )
        if self.drawn_from_RV is not self.logits_RV:
            logprobs_R = self.logprobs(tokens_R)
        return tokens_R, logprobs_R

    def logprobs(self, tokens_R: torch.Tensor) -> torch.Tensor:
        return token_logprobs(self.logits_RV, self._temperature_R, tokens_R)


class _Shaped:
    """Logits with what was asked of them: see `row_inputs.shape_arrays`."""

    def __init__(self, logits_RV: torch.Tensor, inputs: Tensors) -> None:
        self._inputs = inputs
        self._temperature_R = inputs["temperature"]
        threshold_R = _threshold(logits_RV, inputs)
        self._plain = _Rows(logits_RV, logits_RV, self._temperature_R, threshold_R)
        self._changed: _Rows | None = None
        if "changed" in inputs:
            self._changed = _changed(logits_RV, inputs)

    def draw(self, uniforms_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._changed is None:
            return self._plain.draw(uniforms_R)
        index_C = self._inputs["changed"]
        own = self._changed.draw(uniforms_R[index_C])
        if self._are_all_changed:
            return own
        tokens_R, logprobs_R = self._plain.draw(uniforms_R)
        tokens_R[index_C], logprobs_R[index_C] = own
        return tokens_R, logprobs_R

    def logprobs(self, tokens_R: torch.Tensor) -> torch.Tensor:
        if self._changed is None:
            return self._plain.logprobs(tokens_R)
        index_C = self._inputs["changed"]
        own_C = self._changed.logprobs(tokens_R[index_C])
        if self._are_all_changed:
            return own_C
        logprobs_R = self._plain.logprobs(tokens_R)
        logprobs_R[index_C] = own_C
        return logprobs_R

    def extras(self, tokens_R: torch.Tensor, most: int) -> Tensors:
        """The extras that were requested about the token of each row; ``most``: likeliest tokens of
        a row."""
        inputs, found = self._inputs, Tensors()
        if "wants_raw" in inputs:
            index = inputs["wants_raw"]
            at_one = torch.ones_like(self._temperature_R[index])
            raw_RV = self._plain.logits_RV[index]
            found["raw"] = token_logprobs(raw_RV, at_one, tokens_R[index])
        if "wants_sampling" in inputs:
            index = inputs["wants_sampling"]
            kept_RV = self._some("drawn_from_RV", index).float()
            if self._plain.threshold_R is not None:
                cut_RV = kept_RV < self._some("threshold_R", index)[:, None]
                kept_RV = kept_RV.masked_fill(cut_RV, float("-inf"))
            found["sampling"] = token_logprobs(kept_RV, self._temperature_R[index], tokens_R[index])
        if "wants_top" in inputs:
            index = inputs["wants_top"]
            logits = self._some("logits_RV", index)
            ids_RK = likeliest(logits, most)
            found["top_ids"] = ids_RK
            found["top_values"] = token_logprobs(logits, self._temperature_R[index], ids_RK)
        if "wants_entropy" in inputs:
            index = inputs["wants_entropy"]
            found["entropies"] = entropy(self._some("logits_RV", index), self._temperature_R[index])
        return found

    @property
    def _are_all_changed(self) -> bool:
        return len(self._inputs["changed"]) == len(self._temperature_R)

    def _some(self, name: str, index: torch.Tensor) -> torch.Tensor:
        """The values of some rows; changed rows have their own."""
        found: torch.Tensor = getattr(self._plain, name)[index]
        if self._changed is None:
            return found
        place = self._inputs["changed_place"][index]
        own = getattr(self._changed, name)[place.clamp(min=0)]
        is_changed = (place >= 0).view(-1, *[1] * (own.dim() - 1))
        return torch.where(is_changed, own, found)


def _threshold(logits_RV: torch.Tensor, inputs: Tensors) -> torch.Tensor | None:
    """Float32 [R], -inf but for truncated rows; None where nobody truncates."""
    if "truncated" not in inputs:
        return None
    index_T = inputs["truncated"]
    cuts = [inputs[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    if len(index_T) == len(logits_RV):
        return truncation_threshold(logits_RV, *cuts)
    threshold_R = torch.full_like(inputs["temperature"], float("-inf"))
    threshold_R[index_T] = truncation_threshold(
        logits_RV[index_T], *(values_R[index_T] for values_R in cuts)
    )
    return threshold_R


def _changed(logits_RV: torch.Tensor, inputs: Tensors) -> _Rows:
    """A float32 copy of the rows that are changed: penalties, costs and biases applied in that
    order, then a second one without the tokens that are forbidden."""
    index_C = inputs["changed"]
    logits_CV = logits_RV[index_C].float()
    if "edit_rows" in inputs:
        place = (inputs["edit_rows"], inputs["edit_tokens"])
        values = logits_CV[place]
        penalties = inputs["penalties"]
        values = _bounded(values, torch.where(values > 0, values / penalties, values * penalties))
        values = _bounded(values, values - inputs["costs"])
        logits_CV[place] = _bounded(values, values + inputs["biases"])
    drawn_from_CV = logits_CV
    if "banned_rows" in inputs:
        drawn_from_CV = logits_CV.clone()
        drawn_from_CV[inputs["banned_rows"], inputs["banned_tokens"]] = float("-inf")
    temperature_C = inputs["temperature"][index_C]
    threshold_C = None
    if "truncated" in inputs:  # by somebody: of who is not cut nothing is
        cuts = (inputs[name][index_C] for name in ("top_k", "top_p", "min_p"))
        threshold_C = truncation_threshold(drawn_from_CV, temperature_C, *cuts)
    return _Rows(logits_CV, drawn_from_CV, temperature_C, threshold_C)


def _bounded(values: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """Keep finite values finite, as in `penalties`."""
    largest = torch.finfo(torch.float32).max
    return torch.where(values.isfinite(), changed.clamp(-largest, largest), changed)


def _sampled(read: dict[str, NDArray], rows: SampleRows, wanted: RequestedExtras) -> Sampled:
    tokens, logprobs = read["tokens"].tolist(), read["logprobs"].tolist()
    extras = [NO_EXTRAS] * len(tokens)
    if not wanted:
        return Sampled(tokens=tokens, logprobs=logprobs, extras=extras)
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
    return Sampled(tokens=tokens, logprobs=logprobs, extras=extras)


def _listed(read: dict[str, NDArray], name: str) -> list:
    return read[name].tolist() if name in read else []
