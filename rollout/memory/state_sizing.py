"""How many state slots there are."""

from __future__ import annotations

from rollout.config import MemoryConfig
from rollout.memory.state_slots import SLOTS_PER_ROW, StateSizes

NODES_PER_REQUEST = 8
"""Draft nodes of each request for which there are slots when all run. Fewer have more."""

CHECKPOINTS_PER_REQUEST = 2
"""States of cached prefixes: of its prompt, say, and where it ended."""

BUDGET_SHARE = 0.5
"""Of the bytes for KV and states together, what scratch and checkpoints may bring the states to."""


def state_sizes(memory: MemoryConfig, max_running: int, slot_bytes: int, budget: int) -> StateSizes:
    """``memory.state_slots``, or by default what every request that may run needs, and one to score
    with, and then as many draft nodes and checkpoints as half of the budget holds.

    Args:
        slot_bytes: of one state of all layers.
        budget: bytes for KV slots and states together.
    """
    slots = memory.state_slots
    if slots is None:
        needed = SLOTS_PER_ROW * (max_running + 1)
        wished = max_running * (NODES_PER_REQUEST + CHECKPOINTS_PER_REQUEST)
        affordable = int(budget * BUDGET_SHARE) // slot_bytes - needed
        slots = needed + min(wished, max(0, affordable))
    return StateSizes(num_slots=slots, interval=memory.state_interval)
