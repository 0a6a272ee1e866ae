"""Logits with penalties, biases, forbidden tokens and truncation applied.

A row's logits stay in the model's dtype unless its own parameters change them, so that no row is
computed otherwise because of its company, and no batch is copied as float32 for the sake of one.

Legend: R rows, C rows whose logits are changed, V vocabulary, W rows that ask for extras, K tokens
of a row, M words of bits, N bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.ops.categorical import categorical, entropy, token_logprobs
from rollout.ops.truncation import truncation_threshold
from rollout.sampling.row_inputs import Changes, RowInputs

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class _Rows:
    logits_RV: torch.Tensor  # of which logprobs are taken
    drawn_from_RV: torch.Tensor  # the same without forbidden tokens
    temperature_R: torch.Tensor
    threshold_R: torch.Tensor | None  # logits below are not drawn; None: nobody truncates

    def draw(self, uniforms_R: torch.Tensor) -> Pair:
        tokens_R, logprobs_R = categorical(
            self.drawn_from_RV, self.temperature_R, uniforms_R, self.threshold_R
        )
        if self.drawn_from_RV is not self.logits_RV:
            logprobs_R = self.logprobs(tokens_R)
        return tokens_R, logprobs_R

    def logprobs(self, tokens_R: torch.Tensor) -> torch.Tensor:
        return token_logprobs(self.logits_RV, self.temperature_R, tokens_R)


class ShapedLogits:
    """The rows of a step as `RowInputs` wants them. Nothing waits for the device."""

    def __init__(self, logits_RV: torch.Tensor, inputs: RowInputs[torch.Tensor]) -> None:
        self._plain = _Rows(
            logits_RV=logits_RV,
            drawn_from_RV=logits_RV,
            temperature_R=inputs.temperature_R,
            threshold_R=_threshold(logits_RV, inputs),
        )
        self._changes = inputs.changes
        self._changed: _Rows | None = None  # None: no row is
        if inputs.changes is not None:
            self._changed = _changed(logits_RV, inputs, inputs.changes)

    def draw(self, uniforms_R: torch.Tensor) -> Pair:
        """A token of each row, -1 for a row without a distribution, and its logprob."""
        if self._changed is None or self._changes is None:
            return self._plain.draw(uniforms_R)
        own_C = self._changed.draw(_taken(uniforms_R, self._changes.rows_C))
        if self._are_all_changed:
            return own_C
        tokens_R, logprobs_R = self._plain.draw(uniforms_R)
        rows_C = self._changes.rows_C
        tokens_R[rows_C], logprobs_R[rows_C] = own_C
        return tokens_R, logprobs_R

    def logprobs(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """The logprob of a token of each row."""
        if self._changed is None or self._changes is None:
            return self._plain.logprobs(tokens_R)
        own_C = self._changed.logprobs(_taken(tokens_R, self._changes.rows_C))
        if self._are_all_changed:
            return own_C
        logprobs_R = self._plain.logprobs(tokens_R)
        logprobs_R[self._changes.rows_C] = own_C
        return logprobs_R

    def raw_logprobs(self, tokens_R: torch.Tensor, rows_W: torch.Tensor) -> torch.Tensor:
        """Logprobs [W] of the model itself, at temperature 1."""
        logits_WV = _taken(self._plain.logits_RV, rows_W)
        ones_W = torch.ones(len(rows_W), device=logits_WV.device)
        return token_logprobs(logits_WV, ones_W, _taken(tokens_R, rows_W))

    def sampling_logprobs(self, tokens_R: torch.Tensor, rows_W: torch.Tensor) -> torch.Tensor:
        """Logprobs [W] of tokens, renormalised over those that could be drawn."""
        kept_WV = self._drawable(rows_W)
        temperature_W = _taken(self._plain.temperature_R, rows_W)
        return token_logprobs(kept_WV, temperature_W, _taken(tokens_R, rows_W))

    def sampling_masks(self, rows_W: torch.Tensor) -> torch.Tensor:
        """The tokens that could be drawn, as bits of int32 words [W, M], the lowest bit first."""
        kept_WV = self._drawable(rows_W) > float("-inf")
        bits = torch.nn.functional.pad(kept_WV, (0, -kept_WV.shape[1] % 32))
        values = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
        bytes_WN = (bits.view(len(rows_W), -1, 8) * values).sum(dim=2, dtype=torch.uint8)
        return bytes_WN.view(torch.int32)

    def logprobs_of(self, ids_WK: torch.Tensor, rows_W: torch.Tensor) -> torch.Tensor:
        """The logprobs [W, K] of given tokens."""
        logits_WV = self._of("logits_RV", rows_W)
        return token_logprobs(logits_WV, _taken(self._plain.temperature_R, rows_W), ids_WK)

    def top_logprobs(self, rows_W: torch.Tensor, count: int) -> Pair:
        """The likeliest tokens [W, K] and their logprobs."""
        logits_WV = self._of("logits_RV", rows_W)
        ids_WK = _likeliest(logits_WV, count)
        temperature_W = _taken(self._plain.temperature_R, rows_W)
        return ids_WK, token_logprobs(logits_WV, temperature_W, ids_WK)

    def entropies(self, rows_W: torch.Tensor) -> torch.Tensor:
        """Entropies in nats [W] of the distributions that `logprobs` are taken from."""
        logits_WV = self._of("logits_RV", rows_W)
        return entropy(logits_WV, _taken(self._plain.temperature_R, rows_W))

    def _drawable(self, rows_W: torch.Tensor) -> torch.Tensor:
        """Logits [W, V] of what could be drawn, -inf elsewhere."""
        kept_WV = self._of("drawn_from_RV", rows_W)
        if self._plain.threshold_R is None:
            return kept_WV
        threshold_W1 = self._of("threshold_R", rows_W)[:, None]
        return kept_WV.masked_fill(kept_WV < threshold_W1, float("-inf"))

    @property
    def _are_all_changed(self) -> bool:
        changed = self._changed
        return changed is not None and len(changed.logits_RV) == len(self._plain.logits_RV)

    def _of(self, name: str, rows_W: torch.Tensor) -> torch.Tensor:
        """Values of some rows; changed rows have their own."""
        if self._changed is None or self._changes is None:
            return _taken(getattr(self._plain, name), rows_W)
        if self._are_all_changed:
            return _taken(getattr(self._changed, name), rows_W)
        places_W = _taken(self._changes.places_R, rows_W)
        own = getattr(self._changed, name)[places_W.clamp(min=0)]
        is_changed = (places_W >= 0).view(-1, *[1] * (own.dim() - 1))
        return torch.where(is_changed, own, _taken(getattr(self._plain, name), rows_W))


def _taken(values: torch.Tensor, rows_W: torch.Tensor) -> torch.Tensor:
    """The values of rows that are given ascending."""
    return values if len(rows_W) == len(values) else values[rows_W]


def _threshold(logits_RV: torch.Tensor, inputs: RowInputs[torch.Tensor]) -> torch.Tensor | None:
    """Float32 [R], -inf but for truncated rows; None where nobody truncates."""
    truncation, temperature_R = inputs.truncation, inputs.temperature_R
    if truncation is None:
        return None
    rows_T = truncation.rows_T
    cuts = (temperature_R, truncation.top_k_R, truncation.top_p_R, truncation.min_p_R)
    if len(rows_T) == len(logits_RV):
        return truncation_threshold(logits_RV, *cuts)
    threshold_R = torch.full_like(temperature_R, float("-inf"))
    if len(rows_T):
        cuts_T = (values_R[rows_T] for values_R in cuts)
        threshold_R[rows_T] = truncation_threshold(logits_RV[rows_T], *cuts_T)
    return threshold_R


def _changed(
    logits_RV: torch.Tensor, inputs: RowInputs[torch.Tensor], changes: Changes[torch.Tensor]
) -> _Rows:
    """A float32 copy of the rows that are changed: penalties, costs and biases applied in that
    order, then a second one without the tokens that are forbidden."""
    rows_C = changes.rows_C
    logits_CV = logits_RV[rows_C].float()
    if len(changes.edited_E):
        flat = logits_CV.view(-1)
        flat[changes.edited_E] = _edited(flat[changes.edited_E], changes.edits_3E)
    drawn_from_CV = logits_CV
    if len(changes.forbidden_X):
        drawn_from_CV = logits_CV.clone()
        drawn_from_CV.view(-1)[changes.forbidden_X] = float("-inf")
    temperature_C = _taken(inputs.temperature_R, rows_C)
    threshold_C, truncation = None, inputs.truncation
    if truncation is not None:  # the cuts of rows that do not truncate leave every token
        cuts_R = (truncation.top_k_R, truncation.top_p_R, truncation.min_p_R)
        cuts_C = (_taken(values_R, rows_C) for values_R in cuts_R)
        threshold_C = truncation_threshold(drawn_from_CV, temperature_C, *cuts_C)
    return _Rows(
        logits_RV=logits_CV,
        drawn_from_RV=drawn_from_CV,
        temperature_R=temperature_C,
        threshold_R=threshold_C,
    )


def _edited(logits_E: torch.Tensor, edits_3E: torch.Tensor) -> torch.Tensor:
    """Logits with penalties, costs and biases applied. Finite values stay finite, however large a
    penalty: a row with +inf has no distribution."""
    penalties_E, costs_E, biases_E = edits_3E
    largest = torch.finfo(torch.float32).max
    is_finite_E = logits_E.abs() <= largest

    def bounded(values_E: torch.Tensor) -> torch.Tensor:
        return torch.where(is_finite_E, values_E.clamp(-largest, largest), values_E)

    values_E = torch.where(logits_E > 0, logits_E / penalties_E, logits_E * penalties_E)
    return bounded(bounded(bounded(values_E) - costs_E) + biases_E)


def _likeliest(logits_RV: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [R, K], the likeliest first and of equal ones the lowest; fewer where V is less.

    `torch.topk` alone orders equals, of which 16-bit logits have many, as suits how many rows and
    tokens it is asked about: a row would depend on its company.
    """
    vocab = logits_RV.shape[1]
    bits_RV = logits_RV.float().contiguous().view(torch.int32)
    # Floats are ordered as integers are when the negative ones are flipped.
    keys_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)).long()
    keys_RV <<= 32
    keys_RV += torch.arange(vocab - 1, -1, -1, device=logits_RV.device)
    return keys_RV.topk(min(count, vocab), dim=1).indices
