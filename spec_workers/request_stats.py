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
    total_ms = times.draft + times.forward + times.sample
    row_share = 1.0 / max(1, batch.num_run_tokens + trees.num_nodes)
    entry_draft_ms = times.draft / max(1, len(entries))
    for entry, result in zip(entries, results, strict=True):
        stats = entry.request.stats
        share = row_share * (entry.run_len + result.num_drafted)
        stats.forward_ms += times.forward * share
        stats.total_ms += total_ms * share
        stats.draft_ms += entry_draft_ms
        if forecast is not None:
            stats.predicted_ms += forecast.predicted_ms * share
        if entry.samples:
            stats.verify_steps += 1
            stats.drafted += result.num_drafted
            stats.accepted += len(result.path)
    if proposed is not None and proposed.num_nodes:
        _count_drafts(batch, proposed, verified, results, row_share, total_ms)


def _count_drafts(
    batch: Batch,
    proposed: DraftTrees,
    verified: Verified,
    results: list[EntryResult],
    row_share: float,
    total_ms: float,
) -> None:
    proposed_B = np.diff(proposed.offsets_B1).tolist()
    expected = np.concatenate([[0.0], np.cumsum(verified.values_N)])
    expected_B = np.diff(expected[verified.trees.offsets_B1]).tolist()
    forecast = verified.forecast
    width = sum(entry.samples for entry in batch.entries)
    if forecast is not None and batch.num_run_tokens != width:
        total_ms = forecast.predicted_ms  # with prefill: as in the engine's metrics
    for b, (entry, result) in enumerate(zip(batch.entries, results, strict=True)):
        stats = entry.request.stats
        stats.proposed += proposed_B[b]
        stats.expected_accepted += expected_B[b]
        if forecast is None:
            continue
        share = row_share * (entry.run_len + result.num_drafted)
        token_ms = forecast.decode_ms / width
        dearer_ms = (forecast.predicted_ms - forecast.plain_ms) * share
        stats.predicted_gain_ms += expected_B[b] * token_ms - dearer_ms
        dearer_ms = (total_ms - forecast.plain_ms) * share
        stats.gain_ms += len(result.path) * token_ms - dearer_ms
