"""The device's req_to_token follows the host's through everything that moves slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.memory.device_slot_table import DeviceSlotTable
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.window_slots import WindowSizes
from rollout.ops.transfers import upload
from rollout.types import Scheduled
from tests.helpers.requests import make_request


def changes_of(table, entries):
    columns = [(entry.request.row, entry.start, entry.end) for entry in entries]
    return table.changes(*np.array(columns, dtype=np.int64).T)


@pytest.mark.parametrize("windows", [None, WindowSizes(num_slots=60, window=7)], ids=["", "window"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_batch_are_the_hosts_through_a_random_life(device, seed, windows) -> None:
    """Prefixes are shared, accepted drafts committed, steps fail, rows go and come back. Of layers
    with a window, as far as a window sees."""
    rng = np.random.default_rng(seed)
    memory = KVCacheManager(160, 4, 60, prefix_cache=True, windows=windows)
    table = DeviceSlotTable(memory, device, memory.windows)
    table.tensor.fill_(-7)
    running: list = []
    sent = 0
    for _ in range(150):
        while len(running) < 3:
            tokens = [1] * int(rng.integers(0, 12)) + rng.integers(2, 9, 4).tolist()
            row, computed = memory.admit(np.array(tokens, dtype=np.int32), headroom=0)
            running.append(make_request(tokens))
            running[-1].row, running[-1].computed_len = row, computed
        entries = []
        for request in running:
            start = request.computed_len
            run_len = min(request.extend_len, int(rng.integers(1, 6)))
            assert memory.extend(request.row, start + run_len) == start + run_len
            slots = np.empty(0, dtype=np.int32)
            entries.append(
                Scheduled(request=request, start=start, run_len=run_len, draft_slots=slots)
            )
        for entry, slots in zip(entries, memory.reserve_drafts([3] * 3), strict=True):
            entry.draft_slots = slots
        changes = changes_of(table, entries)
        if rng.random() < 0.1:  # the step fails before the device was told
            memory.end_step()
            continue
        table.apply(changes, upload(changes.writes, device))
        sent += len(changes.writes.indices_C)
        for entry in entries:
            row = entry.request.row
            first, host = 0, memory.req_to_token.table[row, : entry.end]
            if windows is not None:
                first, host = max(0, entry.start + 1 - windows.window), memory.windows.slot_of[host]
                assert 0 not in host[first:]
            assert table.tensor[row, first : entry.end].cpu().tolist() == host[first:].tolist()
        if rng.random() < 0.1:  # and after it was
            memory.end_step()
            continue

        for entry in entries:
            request = entry.request
            request.computed_len = entry.end
            if entry.samples:
                accepted = int(rng.integers(0, 4))
                memory.commit_paths(
                    [request.row], [entry.end], [accepted], entry.draft_slots[:accepted]
                )
                request.computed_len += accepted
                request.tokens += rng.integers(2, 9, accepted + 1).tolist()
        memory.end_step()
        for request in list(running):
            if rng.random() < 0.1 and memory.shared_len(request.row) < request.computed_len:
                memory.share(request.row, request.tokens[: request.computed_len])
            memory.advance(request.row, request.computed_len)
            if len(request.tokens) > 40 or rng.random() < 0.05:
                memory.release(request.row, request.tokens[: request.computed_len])
                running.remove(request)
        memory.check_integrity()
    assert sent > 300


def test_a_decode_step_sends_what_it_runs_alone(device) -> None:
    memory = KVCacheManager(40, 2, 30, prefix_cache=False)
    table = DeviceSlotTable(memory, device)
    row, _ = memory.admit(np.arange(8, dtype=np.int32), headroom=0)
    request = make_request(list(range(8)))
    request.row = row
    none = np.empty(0, dtype=np.int32)
    counts = []
    for start, run_len in ((0, 8), (8, 1), (9, 1)):
        memory.extend(row, start + run_len)
        entry = Scheduled(request=request, start=start, run_len=run_len, draft_slots=none)
        changes = changes_of(table, [entry])
        table.apply(changes, upload(changes.writes, device))
        counts.append(len(changes.writes.indices_C))
    assert counts == [8, 1, 1]
    assert table.tensor.dtype is torch.int32
