"""Wrong arguments and damaged files chosen at random, and a program that leaves its loop open."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import torch

from rollout import SamplingParams
from rollout.errors import RolloutError
from tests.engine.test_learned_file import PARAMS, make_engine
from tests.helpers.hang import HANG_SECONDS

DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]
WRONG: list[Any] = [
    None, True, 5, -1, 0, 10**400, 2**64, 2.5, float("nan"), object(), len, int,
    "", "text", "\ud800", "a\0b", b"ab", bytearray(b"ab"), memoryview(b"ab"), [b"\x05"],
    [], [None], [[]], [[None]], [[5.5]], [5, None], [5, True], [[5, "a"]], [[5, [6]]],
    [[10**400]], [-1], {}, {"a": 1}, {1: 2}, {5}, range(3, 6), [[]], DEEP,
    np.int64(5), np.array([5, 6]), np.array([5.0]), np.array([[5, 6]]), np.array([True]),
    np.array(["a"]), np.array([5], dtype=object), np.float32(2), np.bool_(True),
    torch.tensor(5), torch.tensor([5, 6]), torch.tensor([5.0]), torch.tensor([[5, 6]]),
    PARAMS, [PARAMS, None], [{}], [{"role": "user"}], [[{"role": 1, "content": 2}]],
]  # fmt: skip
SCORED = {"prompt_ids": [5], "output_ids": [6], "params": PARAMS}
SENT = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
GROUP = {
    "master_address": "127.0.0.1", "master_port": 0, "rank_offset": 0, "world_size": 2,
    "group_name": "g", "backend": "gloo", "timeout": 0.01,
}  # fmt: skip
UPDATE = {"selector": "all", "flush_cache": True, "weight_version": None, "timeout": 3.0}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("generate", {"prompts": [[5, 6]], "params": PARAMS}),
    ("check", {"prompt": [5, 6], "params": PARAMS}),
    ("submit", {"prompt": [5, 6], "params": PARAMS, "prompt_index": 0, "sample_index": 0}),
    ("submit", {"prompt": [5, 6], "params": PARAMS, "request_seed": 3, "partial_ids": [5]}),
    ("watch", {"request_id": 0}),
    ("abort", {"request_id": 0}),
    ("score", SCORED),
    ("pause_generation", {"mode": "abort"}),
    ("release_memory", {"tags": ["kv_cache"], "keep_weights": True}),
    ("resume_memory", {"tags": ["kv_cache"]}),
    ("begin_weight_update", {"manifest": None, **UPDATE}),
    ("abandon_weight_update", {"reason": "why"}),
    ("update_weights_from_tensor", {"named_tensors": [], "partial": True, "load_format": None}),
    ("update_weights_from_disk", {"model_path": "none"}),
    ("update_weights_from_ipc", {"handles": []}),
    ("init_weights_update_group", GROUP),
    ("destroy_weights_update_group", {"group_name": "g"}),
    ("update_weights_from_distributed", SENT | {"load_format": None}),
    ("decline_weights", {"source": None, "reason": "why"}),
    ("weights_manifest", {"selector": "all", "model_path": None}),
    ("read_weights", {"names": ["lm_head.weight"]}),
    ("weights_digest", {"selector": "all"}),
    ("get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 3}),
    ("add_external_corpus", {"name": "c", "token_chunks": [[5, 6]], "wait": True}),
    ("add_external_corpus", {"documents": ["text"], "publish": "when_ready", "wait": True}),
    ("add_external_corpus", {"file_path": "none", "wait": True}),
    ("remove_external_corpus", {"name": "none"}),
    ("publish_external_corpus", {"name": "none"}),
    ("wait_for_external_corpora", {"timeout": 1.0}),
    ("share_corpus", {"max_bytes": -1}),
    ("learn_corpus_deltas", {"deltas": []}),
    ("save_corpus", {"path": "corpus"}),
    ("load_corpus", {"path": "corpus"}),
]


def refusal(engine, name, arguments):
    """The error that the call raised, of ours or of a file; no other may come out."""
    try:
        getattr(engine, name)(**arguments)
    except (RolloutError, OSError) as error:
        return error
    return None


def undo(engine):
    """Undo whatever a call that was taken has begun."""
    engine.abandon_weight_update()
    if engine.released_tags:
        engine.resume_memory()
    engine.pause_generation()
    engine.continue_generation()
    engine.take_ended()
    for each in engine.external_corpora():
        engine.remove_external_corpus(each.name)


def test_nothing_but_our_errors_comes_of_wrong_values(text_model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some are paths
    engine = make_engine(text_model_path)
    params = SamplingParams(max_new_tokens=9, seed=1)
    tokens = engine.generate([[5, 6, 7]], params)[0].token_ids
    engine.save_corpus("corpus")
    rng = random.Random(7)
    refused = 0
    for name, good in CALLS:
        for argument in good:
            for value in rng.sample(WRONG, 8):
                error = refusal(engine, name, good | {argument: value})
                refused += error is not None
                assert not isinstance(error, OSError) or argument == "path", (name, argument)
                undo(engine)
        engine.check_integrity()
        assert engine.worker.memory.usage.used == 0
    assert refused > 300
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == tokens


def test_a_process_that_forgets_to_close_its_loop_still_ends(tiny_model_path):
    script = (
        "import sys; from rollout import RolloutEngine, SamplingParams\n"
        "from rollout.engine.engine_loop import EngineLoop\n"
        "loop = EngineLoop(RolloutEngine.from_pretrained(sys.argv[1]))\n"
        "params = SamplingParams(max_new_tokens=500, ignore_eos=True)\n"
        "tickets = [loop.submit([5, 6], params) for _ in range(64)]\n"
    )
    command = [sys.executable, "-c", script, str(tiny_model_path)]
    done = subprocess.run(command, timeout=HANG_SECONDS, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
