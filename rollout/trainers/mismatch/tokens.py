"""The differences of two distributions at each sampled token.

Legend: R rows of a block, V vocabulary, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rollout.trainers.exact import token_logprobs
from rollout.trainers.mismatch.result import Spread

_BLOCK_BYTES = 1 << 25  # of one float32 copy of a block's logits; about six are held at a time
_MAX_OWN_ROWS = 32
_NUM_RANGES = 8  # of positions
_NUM_BINS, _LOW, _HIGH = 24, 0.7, 1.3  # of ratios


def rows_per_block(vocab_size: int) -> int:
    """Rows whose logits are compared together."""
    return max(1, _BLOCK_BYTES // (4 * vocab_size))


@dataclass(slots=True)
class TokenDifferences:
    """Statistics of every token so far, in the order of rollouts."""

    temperature: float
    version: int  # of the engine's weights
    trainer: list[float] = field(default_factory=list)  # logprobs
    engine: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)  # the rollout's; NaN: it has none
    versions: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # in the output
    divergences: list[float] = field(default_factory=list)
    entropies: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    flips: int = 0
    max_logit_difference: float = 0.0
    own_rows: list[tuple[torch.Tensor, int, float]] = field(default_factory=list)
    """The engine's logits, token and recorded logprob of some tokens of its present version."""

    def add_block(
        self,
        trainer_RV: torch.Tensor,
        engine_RV: torch.Tensor,
        ids: Sequence[int],
        recorded: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        """Compare rows of logits of both sides; ``ids``: the tokens that were sampled there."""
        trainer_RV = trainer_RV.to(engine_RV.device)
        ids_R = torch.tensor(ids, device=engine_RV.device)
        self.trainer += token_logprobs(trainer_RV, ids_R, self.temperature).tolist()
        self.recorded += recorded
        self.versions += versions
        for row_V, *of_token, version in zip(engine_RV, ids, recorded, versions, strict=True):
            is_own = version == self.version and not math.isnan(of_token[1])
            if is_own and len(self.own_rows) < _MAX_OWN_ROWS:
                self.own_rows.append((row_V.float().cpu().clone(), *of_token))
        common = min(trainer_RV.shape[1], engine_RV.shape[1])  # a trainer may pad the vocabulary
        trainer_RV, engine_RV = trainer_RV[:, :common], engine_RV[:, :common]
        self.flips += int((trainer_RV.argmax(-1) != engine_RV.argmax(-1)).sum())
        apart_RV = (trainer_RV.float() - engine_RV.float()).abs_().nan_to_num_(0.0, math.inf)
        self.max_logit_difference = max(self.max_logit_difference, apart_RV.max().item())
        del apart_RV
        divisor = self.temperature or 1.0
        logs = [(each.float() / divisor).log_softmax(-1) for each in (trainer_RV, engine_RV)]
        for entropies, log_RV in zip(self.entropies, logs, strict=True):
            entropies += log_RV.exp().mul_(log_RV).nan_to_num_(0.0).sum(-1).neg().tolist()
        probabilities_RV = logs[1].exp()
        terms_RV = logs[1].sub_(logs[0]).mul_(probabilities_RV).nan_to_num_(0.0, math.inf)
        self.divergences += terms_RV.sum(-1).clamp_min(0).tolist()

    def own_differences(self) -> torch.Tensor:
        """The engine's logprobs less the rollouts' of tokens of its weight version."""
        apart_N = _doubles(self.engine) - _doubles(self.recorded)
        return apart_N[(torch.tensor(self.versions) == self.version) & ~apart_N.isnan()]

    def figures(self) -> dict[str, Any]:
        """The fields of a `Mismatch` that are of tokens."""
        trainer_N, engine_N, recorded_N = map(_doubles, (self.trainer, self.engine, self.recorded))
        apart_N, own_N = (trainer_N - engine_N).abs(), self.own_differences()
        ratios_N = (trainer_N - torch.where(recorded_N.isnan(), engine_N, recorded_N)).exp()
        size = math.ceil((max(self.positions) + 1) / _NUM_RANGES)
        return {
            "tokens": len(apart_N),
            "max_difference": apart_N.max().item(),
            "mean_difference": apart_N.mean().item(),
            "max_logit_difference": self.max_logit_difference,
            "engine_difference": own_N.abs().max().item() if len(own_N) else 0.0,
            "ratio": _spread(ratios_N),
            "ratios": _histogram(ratios_N),
            "outside": ((ratios_N < 0.8) | (ratios_N > 1.2)).double().mean().item(),
            "divergence": _spread(_doubles(self.divergences)),
            "entropy": tuple(_doubles(each).mean().item() for each in self.entropies),
            "flips": self.flips / len(apart_N),
            "by_version": _by(self.versions, apart_N),
            "by_position": _by([each // size * size for each in self.positions], apart_N),
        }


def _by(keys: Sequence[int], values_N: torch.Tensor) -> dict[int, Spread]:
    keys_N = torch.tensor(keys)
    return {key: _spread(values_N[keys_N == key]) for key in sorted(set(keys))}


def _histogram(ratios_N: torch.Tensor) -> list[tuple[float, int]]:
    width = (_HIGH - _LOW) / _NUM_BINS
    bins_N = ((ratios_N.nan_to_num(_HIGH) - _LOW) / width).clamp(0, _NUM_BINS - 1).long()
    counts = torch.bincount(bins_N, minlength=_NUM_BINS).tolist()
    return [(_LOW + (bin + 0.5) * width, count) for bin, count in enumerate(counts)]


def _spread(values_N: torch.Tensor) -> Spread:
    least, largest = values_N.min().item(), values_N.max().item()
    return Spread(least, values_N.mean().item(), largest, len(values_N))


def _doubles(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
