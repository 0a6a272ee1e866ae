"""Two ranks of DeepSpeed's ZeRO-3 and of FSDP2, whose weights an engine takes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.launch import launch

pytestmark = pytest.mark.skipif(
    not (find_spec("deepspeed") and find_spec("peft")), reason="deepspeed and peft are not there"
)

BOTH = ("zero-3", "fsdp2")
CASES = [
    *[("follows", kind, "untied", {}) for kind in BOTH],
    *[("a_failure_is_raised_on_every_rank", kind, "untied", {}) for kind in BOTH],
    *[("reaches_tensor_parallel_ranks", kind, "untied", {}) for kind in BOTH],
    *[("follows", kind, "tied", {}) for kind in ("fsdp1", "ddp")],
    *[("gathers_few_tensors_at_a_time", kind, "untied", {}) for kind in BOTH],
    ("masters_come_on_request", "zero-3", "untied", {}),
    ("it_syncs_after_whole_steps", "zero-3", "untied", {}),
    ("what_one_rank_of_the_engine_refuses_reaches_none", "fsdp2", "untied", {}),
]


def test_an_engine_follows_a_sharded_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASES", json.dumps(CASES))
    launch("tests.trainers.trainer_ranks", tmp_path, ranks=2)
