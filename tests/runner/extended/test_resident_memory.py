"""The operating system has an engine's memory back while it sleeps."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers.hang import HANG_SECONDS
from tests.helpers.tiny_model import save_tiny_llama

MEASURE = """
import json, sys
import psutil
from rollout import RolloutEngine, SamplingParams

def resident():
    return psutil.Process().memory_info().rss

def touch():
    engine.flush_cache()
    pool = engine.worker.target.runner._kv_pool
    for tensor in pool.keys + pool.values:
        tensor.fill_(1)

engine = RolloutEngine.from_pretrained(sys.argv[1], kv_bytes=64 << 20, max_running=4)
params = SamplingParams(max_new_tokens=16, ignore_eos=True, n=2)
found = []
for _ in range(2):
    tokens = [r.token_ids for r in engine.generate([[5, 6, 7], [8, 9]], params)]
    touch()
    awake = resident()
    freed = engine.release_memory(keep_weights=False)
    asleep = resident()
    engine.resume_memory()
    engine.update_weights_from_disk(sys.argv[1])
    again = [r.token_ids for r in engine.generate([[5, 6, 7], [8, 9]], params)]
    touch()
    found.append([freed, awake, asleep, resident(), tokens == again])
print(json.dumps(found))
"""


def test_the_operating_system_has_the_memory_back(tmp_path):
    """By the resident set of a process of its own, twice in a row."""
    path = save_tiny_llama(
        tmp_path, vocab_size=4096, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4,
        intermediate_size=1536,
    )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    for freed, awake, asleep, again, same_tokens in json.loads(run.stdout):
        assert freed["weights"] > 100e6
        assert freed["kv_cache"] > 60e6
        said = sum(freed.values())
        assert awake - asleep >= 0.9 * said, f"said {said}, fell by {awake - asleep}"
        assert again - awake < 0.5 * said, "the mapped file counts too"
        assert same_tokens
