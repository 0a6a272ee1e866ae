"""Estimated against real acceptance of draft nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.report.learned import NUM_TENTHS, calibration
from rollout.report.plots.canvas import NothingToDrawError, Theme, legend_beside
from rollout.report.run import Log

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def calibration_by_tenth(figure: Figure, theme: Theme, log: Log) -> None:
    """Draw the last run's accepted shares against their estimates. May raise NothingToDrawError."""
    found = next((each for run in reversed(log.runs) if (each := calibration(run.learned))), None)
    if found is None:
        raise NothingToDrawError(
            "No draft node was judged by a learned budget, or the log ends before that was written "
            "(spec=none drafts nothing)."
        )
    rates, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    seen = found.count_K > 0
    count_J, accepted_J = found.count_K[seen], found.accepted_K[seen]
    estimate_J, rate_J = found.expected_K[seen] / count_J, accepted_J / count_J
    low_J, high_J = _interval(rate_J, count_J)
    rates.plot([0, 1], [0, 1], color=theme.muted, linewidth=1.0, linestyle="--", label="perfect")
    rates.errorbar(
        estimate_J, rate_J, [rate_J - low_J, high_J - rate_J], color=theme.series[0], marker="o",
        markersize=5, linewidth=1.4, elinewidth=1.0, capsize=3, label="accepted,\n95 % interval",
    )  # fmt: skip
    rates.set(ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    middles_K = (np.arange(NUM_TENTHS) + 0.5) / NUM_TENTHS
    counts.bar(middles_K, found.count_K, width=0.8 / NUM_TENTHS, color=theme.series[0])
    counts.set(xlabel="estimated probability of being accepted", ylabel="nodes verified")
    counts.set_xticks(np.arange(NUM_TENTHS + 1) / NUM_TENTHS)
    if count_J.max() > 50 * count_J.min():
        counts.set_yscale("log")
    legend_beside(rates)


def _interval(rate_J: np.ndarray, count_J: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval of a binomial share (E. B. Wilson, JASA 1927), at 95 %."""
    z = 1.96
    middle_J = (rate_J + z**2 / (2 * count_J)) / (1 + z**2 / count_J)
    spread_J = np.sqrt(np.maximum(rate_J * (1 - rate_J), 0) / count_J + (z / (2 * count_J)) ** 2)
    half_J = z * spread_J / (1 + z**2 / count_J)
    return np.minimum(middle_J - half_J, rate_J), np.maximum(middle_J + half_J, rate_J)
