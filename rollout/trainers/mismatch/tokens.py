"""The differences of two distributions at each sampled token.

Legend: R rows of a block, V vocabulary, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rollout.trainers.exact import token_logprobs
from rollout.trainers.mismatch.result import Bucket, Divergence, Ratio

_BLOCK_BYTES = 1 << 25  # of one float32 copy of a block's logits; about six are held at a time
_NUM_RANGES = 8  # of positions
_NUM_BINS, _LOW, _HIGH = 24, 0.7, 1.3  # of ratios


def rows_per_block(vocab_size: int) -> int:
    """Rows whose logits are compared together."""
    return max(1, _BLOCK_BYTES // (4 * vocab_size))


@dataclass(slots=True)
class TokenDifferences:
    """Statistics of every token so far, in the order of rollouts."""

    temperature: float
    trainer: list[float] = field(default_factory=list)  # logprobs
    engine: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)  # the rollout's; NaN: it has none
    positions: list[int] = field(default_factory=list)  # in the output
    versions: list[int] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    entropies: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    flips: int = 0
    max_logit_difference: float = 0.0

    def add_block(
        self, trainer_RV: torch.Tensor, engine_RV: torch.Tensor, ids: Sequence[int]
    ) -> None:
        """Compare rows of logits of both sides; ``ids``: the tokens that were sampled there."""
        trainer_RV = trainer_RV.to(engine_RV.device)
        ids_R = torch.tensor(ids, device=engine_RV.device)
        self.trainer += token_logprobs(trainer_RV, ids_R, self.temperature).tolist()
        self.flips += int((trainer_RV.argmax(-1) != engine_RV.argmax(-1)).sum())
        apart_RV = (trainer_RV.float() - engine_RV.float()).abs_().nan_to_num_(0.0, posinf=0.0)
        self.max_logit_difference = max(self.max_logit_difference, apart_RV.max().item())
        del apart_RV
        logs = [self._log_softmax(each) for each in (trainer_RV, engine_RV)]
        for entropies, log_RV in zip(self.entropies, logs, strict=True):
            entropies += log_RV.exp().mul_(log_RV).nan_to_num_(0.0).sum(-1).neg().tolist()
        probabilities_RV = logs[1].exp()
        terms_RV = logs[1].sub_(logs[0]).mul_(probabilities_RV)
        self.divergences += terms_RV.nan_to_num_(0.0).sum(-1).clamp_min(0).tolist()

    def _log_softmax(self, logits_RV: torch.Tensor) -> torch.Tensor:
        return (logits_RV.float() / (self.temperature or 1.0)).log_softmax(-1)

    def differences(self) -> torch.Tensor:
        """Logprobs of the trainer less the engine's, float64 [N]."""
        return _doubles(self.trainer) - _doubles(self.engine)

    def own_differences(self, version: int) -> torch.Tensor:
        """The engine's logprobs less the rollouts' of tokens of its weight version."""
        apart_N = _doubles(self.engine) - _doubles(self.recorded)
        return apart_N[(torch.tensor(self.versions) == version) & ~apart_N.isnan()]

    def ratios(self) -> torch.Tensor:
        """Probabilities of the trainer over those of the rollout, or of the engine where the
        rollout has none, float64 [N]."""
        recorded_N = _doubles(self.recorded)
        behaviour_N = torch.where(recorded_N.isnan(), _doubles(self.engine), recorded_N)
        return (_doubles(self.trainer) - behaviour_N).exp()

    def ratio(self) -> Ratio:
        found_N = self.ratios()
        outside = ((found_N < 0.8) | (found_N > 1.2)).double().mean().item()
        return Ratio(found_N.min().item(), found_N.mean().item(), found_N.max().item(), outside)

    def mean_entropies(self) -> tuple[float, float]:
        """Of the trainer and of the engine."""
        trainer, engine = (_doubles(each).mean().item() for each in self.entropies)
        return trainer, engine

    def divergence(self) -> Divergence:
        return Divergence(_doubles(self.divergences).mean().item(), max(self.divergences))

    def histogram(self) -> list[tuple[float, int]]:
        """The middle of each bin of ratios, and its tokens; those beyond are in the outer bins."""
        width = (_HIGH - _LOW) / _NUM_BINS
        counts = torch.histc(self.ratios().clamp(_LOW, _HIGH), _NUM_BINS, _LOW, _HIGH)
        return [(_LOW + (bin + 0.5) * width, int(count)) for bin, count in enumerate(counts)]

    def by_position(self) -> list[Bucket]:
        """Differences by ranges of positions in the output."""
        size = math.ceil((max(self.positions) + 1) / _NUM_RANGES)
        ranges = [position // size for position in self.positions]
        return self._buckets(ranges, lambda key: f"{key * size} to {(key + 1) * size - 1}")

    def by_version(self) -> list[Bucket]:
        """Differences by weight version."""
        return self._buckets(self.versions, str)

    def _buckets(self, keys: Sequence[int], name: Callable[[int], str]) -> list[Bucket]:
        apart_N, keys_N = self.differences().abs(), torch.tensor(keys)
        parts = {name(key): apart_N[keys_N == key] for key in sorted(set(keys))}
        return [
            Bucket(name, len(own), own.mean().item(), own.max().item())
            for name, own in parts.items()
        ]


def _doubles(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
