"""The device's req_to_token follows the host's through everything that moves slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.memory.device_slot_table import DeviceSlotTable
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.ops.transfers import upload
from rollout.types import Scheduled
from tests.helpers.requests import make_request
from tests.memory.simulation import Simulation


def send(table: DeviceSlotTable, entries: list[Scheduled], device: torch.device) -> int:
    """Send what changed in the rows of a step; returns how many entries of the table."""
    columns = [(entry.request.row, entry.start, entry.end) for entry in entries]
    changes = table.changes(*np.array(columns, dtype=np.int64).reshape(-1, 3).T)
    table.apply(upload(changes.writes, device))
    table.note(changes)
    return len(changes.writes.indices_C)


class DeviceSimulation(Simulation):
    """In layers with a window the table is right as far as a window sees."""

    def __init__(self, seed: int, kind: str, device: torch.device) -> None:
        super().__init__(seed, kind)
        self.device = device
        self.table = DeviceSlotTable(self.memory, device, self.memory.windows)
        self.table.tensor.fill_(-7)
        self.sent = 0

    def launch(self, entries: list[Scheduled], fails: bool) -> None:
        if not entries or (fails and self.below(2)):  # it fails before the device is told
            return
        self.sent += send(self.table, entries, self.device)
        windows = self.memory.windows
        for entry in entries:
            row = entry.request.row
            first, host = 0, self.memory.req_to_token.table[row, : entry.end]
            if windows is not None:
                first, host = max(0, entry.start + 1 - windows.sizes.window), windows.slot_of[host]
            found = self.table.tensor[row, first : entry.end].cpu().tolist()
            assert found == host[first:].tolist()


@pytest.mark.parametrize("kind", ["plain", "windows"])
def test_rows_of_a_batch_are_the_hosts_whatever_happens(device, kind) -> None:
    simulations = [DeviceSimulation(seed, kind, device) for seed in range(6)]
    for simulation in simulations:
        simulation.play(120)
    assert sum(simulation.sent for simulation in simulations) > 1000


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
        counts.append(send(table, [entry], device))
    assert counts == [8, 1, 1]
    assert table.tensor.dtype is torch.int32
