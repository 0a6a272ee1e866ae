"""Collects the differences of ops over layers and rollouts.

Legend: T rows, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rollout.trainers.mismatch.result import OpDifference

_LOWER = (torch.bfloat16, torch.float16)
_TINY = 1e-30
Alternatives = Mapping[str, Callable[[], torch.Tensor]]
"""The engine's op changed, by what was changed."""


@dataclass(slots=True)
class _Sum:
    rounding: float
    difference: float = 0.0
    squares: float = 0.0  # of relative mean differences
    alternatives: dict[str, float] = field(default_factory=dict)
    precisions: set[str] = field(default_factory=set)  # of each difference beyond rounding


class OpDifferences:
    """Differences by op and layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype``: the coarser of trainer and engine."""
        self._eps = torch.finfo(dtype).eps
        self._sums: dict[tuple[str, int | None], _Sum] = {}

    def add(
        self,
        name: str,
        layer: int | None,
        trainer_TF: torch.Tensor,
        engine_TF: torch.Tensor,
        *,
        summed: int = 1,
        stages: int = 1,
        unscaled_TF: torch.Tensor | None = None,
        alternatives: Alternatives | None = None,
    ) -> None:
        """Compare outputs of the same shape.

        Args:
            summed: terms of each of the op's sums, which are rounded in float32.
            stages: sums and roundings one after the other.
            unscaled_TF: the trainer's output before a weight was multiplied with it.
            alternatives: tried where rounding does not explain the difference.
        """
        rounding = self.rounding(stages, summed)
        found = self._sums.setdefault((name, layer), _Sum(rounding))
        engine_TF, trainer_TF = engine_TF.flatten(1), trainer_TF.flatten(1)
        difference, mean = relative_difference(trainer_TF, engine_TF)
        found.difference = max(found.difference, difference)
        found.squares += mean**2
        if difference <= rounding:
            return
        if engine_TF.dtype is torch.float32:
            shown = (trainer_TF, trainer_TF if unscaled_TF is None else unscaled_TF)
            found.precisions.add(max(map(_lower_precision, shown)))
        for what, op in (alternatives or {}).items():
            other, _ = relative_difference(trainer_TF, op().flatten(1))
            found.alternatives[what] = max(found.alternatives.get(what, 0.0), other)

    def rounding(self, stages: int, summed: int = 1) -> float:
        """The largest relative difference that rounding explains; see `add`."""
        return stages * (4 * self._eps + 4 * summed**0.5 * torch.finfo(torch.float32).eps)

    def listed(self) -> list[OpDifference]:
        """All ops, the largest in units of its rounding first."""
        total = sum(each.squares for each in self._sums.values()) or 1.0
        found = [
            OpDifference(
                name=name,
                layer=layer,
                difference=each.difference,
                rounding=each.rounding,
                share=each.squares / total,
                alternative=min(
                    (what for what, left in each.alternatives.items() if left <= each.rounding),
                    key=each.alternatives.__getitem__,
                    default="",
                ),
                precision=min(each.precisions, default=""),
            )
            for (name, layer), each in self._sums.items()
        ]
        return sorted(found, key=lambda op: -op.difference / op.rounding)


def relative_difference(trainer_TF: torch.Tensor, engine_TF: torch.Tensor) -> tuple[float, float]:
    """The largest difference of a row over the row's largest value, and the root mean square of
    all over that of the values. Infinite where only one side has no number."""
    trainer_TF, engine_TF = trainer_TF.float().to(engine_TF.device), engine_TF.float()
    if not trainer_TF.numel() or torch.equal(trainer_TF, engine_TF):
        return 0.0, 0.0
    apart_TF = (trainer_TF - engine_TF).abs().nan_to_num(torch.inf, torch.inf)
    rows_T = apart_TF.amax(-1) / engine_TF.abs().amax(-1).clamp_min(_TINY)
    mean = apart_TF.square().mean() / engine_TF.square().mean().clamp_min(_TINY)
    return rows_T.max().item(), mean.sqrt().item()


def _lower_precision(values_TF: torch.Tensor) -> str:
    """The name of a 16-bit dtype that holds all values but for float32's rounding; else empty."""
    values_TF, noise = values_TF.float(), 4 * torch.finfo(torch.float32).eps
    for lower in _LOWER:
        apart_TF = (values_TF.to(lower).float() - values_TF).abs()
        if bool((apart_TF <= noise * values_TF.abs()).all()):
            return str(lower).removeprefix("torch.")
    return ""
