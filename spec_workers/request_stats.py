"""Books a step to the requests that took part in it."""

from __future__ import annotations

import numpy as np

from rollout.types import Batch, DraftTrees, EntryResult, StepTimes
from spec_workers.budget import Verified


def count_step(
    batch: Batch,
    proposed: DraftTrees | None,
    verified: Verified,
    results: list[EntryResult],
    times: StepTimes,
) -> None:
    """Adds to each request's stats its share of the step: by query rows, of drafting by entries."""
    entries, trees, forecast = batch.entries, verified.trees, verified.forecast
    nodes_B = np.diff(trees.offsets_B1)
    proposed_B = nodes_B if proposed is None else np.diff(proposed.offsets_B1)
    rows_B = np.array([entry.run_len for entry in entries], dtype=np.int64) + nodes_B
    share_B = rows_B / max(1, int(rows_B.sum()))
    expected = np.concatenate([[0.0], np.cumsum(verified.values_N)])
    expected_B = np.diff(expected[trees.offsets_B1])
    total_ms = times.draft + times.forward + times.sample
    token_ms = forecast.decode_ms / sum(e.samples for e in entries) if forecast else 0.0
    for b, (entry, result) in enumerate(zip(entries, results, strict=True)):
        stats, share = entry.request.stats, float(share_B[b])
        stats.forward_ms += times.forward * share
        stats.draft_ms += times.draft / len(entries)
        stats.total_ms += total_ms * share
        if entry.samples:
            stats.verify_steps += 1
            stats.proposed += int(proposed_B[b])
            stats.drafted += result.num_drafted
            stats.accepted += len(result.path)
            stats.expected_accepted += float(expected_B[b])
        if forecast is None:
            continue
        stats.predicted_ms += forecast.predicted_ms * share
        if trees.num_nodes:
            dearer = (forecast.predicted_ms - forecast.plain_ms) * share
            stats.predicted_gain_ms += float(expected_B[b]) * token_ms - dearer
            dearer = (total_ms - forecast.plain_ms) * share
            stats.gain_ms += len(result.path) * token_ms - dearer
