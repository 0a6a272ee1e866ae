"""KVCacheManager under random operations: see `Simulation`."""

from __future__ import annotations

from tests.memory.simulation import Simulation

KINDS = ("plain", "no prefix cache", "states", "windows")


def test_every_row_reads_its_own_prefix_whatever_happens():
    evicted = dict.fromkeys(KINDS, 0)
    for seed in range(120):
        kind = KINDS[seed % len(KINDS)]
        simulation = Simulation(seed, kind)
        memory = simulation.memory
        try:
            simulation.play(200)
            memory.reset()
            simulation.contents.check_empty()
        except Exception as error:
            error.add_note(f"seed {seed}, {kind}")
            raise
        layers = memory.states or memory.windows
        evicted[kind] += memory.counters.evicted + (layers.evicted if layers else 0)
    assert min(evicted[kind] for kind in ("plain", "states", "windows")) > 300
