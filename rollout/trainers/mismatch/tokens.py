"""The differences of two distributions at each sampled token.

Legend: R rows of a block, V vocabulary, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rollout.trainers.exact import token_logprobs
from rollout.trainers.mismatch.result import Bucket, Divergence, Ratio

BLOCK_BYTES = 1 << 25
"""Of one float32 copy of a block's logits; there are about six at a time."""

_NUM_RANGES = 8  # of positions
_BINS = 24  # of ratios, from 0.7 to 1.3


def rows_per_block(vocab_size: int) -> int:
    """Rows whose logits are compared together."""
    return max(1, BLOCK_BYTES // (4 * vocab_size))


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
        if torch.equal(trainer_RV, engine_RV):
            self.divergences += [0.0] * len(ids)
        else:
            apart = (trainer_RV.float() - engine_RV.float()).abs().nan_to_num(0.0, posinf=0.0).max()
            self.max_logit_difference = max(self.max_logit_difference, apart.item())
        logs = [self._log_softmax(each) for each in (trainer_RV, engine_RV)]
        if len(self.divergences) < len(self.trainer):
            probabilities_RV = logs[1].exp()
            terms_RV = torch.sub(logs[1], logs[0]).mul_(probabilities_RV)
            self.divergences += terms_RV.nan_to_num_(0.0).sum(-1).clamp_min(0).tolist()
        for entropies, log_RV in zip(self.entropies, logs, strict=True):
            entropies += log_RV.exp().mul_(log_RV).nan_to_num_(0.0).sum(-1).neg().tolist()

    def _log_softmax(self, logits_RV: torch.Tensor) -> torch.Tensor:
        return (logits_RV.float() / (self.temperature or 1.0)).log_softmax(-1)

    @property
    def differences(self) -> torch.Tensor:
        """Logprobs of the trainer less the engine's, float64 [N]."""
        return torch.tensor(self.trainer, dtype=torch.float64) - torch.tensor(
            self.engine, dtype=torch.float64
        )

    def own_differences(self, version: int) -> torch.Tensor:
        """The engine's logprobs less the rollouts' of tokens of its weight version."""
        return torch.tensor(
            [
                engine - recorded
                for engine, recorded, own in zip(
                    self.engine, self.recorded, self.versions, strict=True
                )
                if own == version and recorded == recorded
            ],
            dtype=torch.float64,
        )

    def ratios(self) -> torch.Tensor:
        """Probabilities of the trainer over those of the rollout, or of the engine where the
        rollout has none, float64 [N]."""
        recorded_N = torch.tensor(self.recorded, dtype=torch.float64)
        engine_N = torch.tensor(self.engine, dtype=torch.float64)
        behaviour_N = torch.where(recorded_N.isnan(), engine_N, recorded_N)
        return (torch.tensor(self.trainer, dtype=torch.float64) - behaviour_N).exp()

    def ratio(self) -> Ratio:
        ratios_N = self.ratios()
        outside = ((ratios_N < 0.8) | (ratios_N > 1.2)).double().mean().item()
        return Ratio(ratios_N.min().item(), ratios_N.mean().item(), ratios_N.max().item(), outside)

    def divergence(self) -> Divergence:
        return Divergence(sum(self.divergences) / len(self.divergences), max(self.divergences))

    def histogram(self) -> list[tuple[float, float, int]]:
        """Tokens by ratio; the first and the last bin have those beyond."""
        edges = [0.7 + 0.6 * index / _BINS for index in range(_BINS + 1)]
        counts = torch.histc(self.ratios().clamp(0.7, 1.3), _BINS, 0.7, 1.3)
        return [(edges[index], edges[index + 1], int(count)) for index, count in enumerate(counts)]

    def by_position(self) -> list[Bucket]:
        """Differences by ranges of positions in the output."""
        size = -(-(max(self.positions) + 1) // _NUM_RANGES)
        found = [position // size for position in self.positions]
        return self._buckets(found, lambda key: f"{key * size} to {(key + 1) * size - 1}")

    def by_version(self) -> list[Bucket]:
        """Differences by weight version."""
        return self._buckets(self.versions, str)

    def _buckets(self, keys: Sequence[int], name: Callable[[int], str]) -> list[Bucket]:
        apart_N, keys_N = self.differences.abs(), torch.tensor(keys)
        found = []
        for key in sorted(set(keys)):
            own = apart_N[keys_N == key]
            found.append(Bucket(name(key), len(own), own.mean().item(), own.max().item()))
        return found
