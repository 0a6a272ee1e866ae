"""Every stage of ZeRO, both FSDPs and DDP, LoRA and other families, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("peft")


from tests.helpers.launch import launch

LORA = {"adapters": ["q_proj", "down_proj"]}
FAMILIES = {  # the products that adapters are trained for
    "latent": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "glm-moe": ["q_proj", "v_proj", "o_proj"],
    "gpt-oss": ["q_proj", "o_proj"],
    "gemma": ["k_proj", "up_proj"],
}
WRAPPERS = ("fsdp2", "fsdp1", "fsdp1-flat", "ddp")
BOTH = {"trained": "bfloat16", "dtypes": ["bfloat16", "float32"]}
CUT, WHOLE = {"sent": "cut"}, {"sent": "whole"}
CASES = [
    *[("follows", f"zero-{stage}", "untied", {}) for stage in range(3)],
    *[("follows", "zero-3", model, {}) for model in ("tied", "experts", *FAMILIES)],
    ("follows", "zero-3", "untied", LORA),
    *[("masters_come_on_request", f"zero-{stage}", "untied", {}) for stage in range(3)],
    ("it_syncs_after_whole_steps", "zero-2", "untied", {}),
    *[("reaches_tensor_parallel_ranks", "zero-3", each, BOTH) for each in ("untied", "experts")],
    *[("reaches_tensor_parallel_ranks", "zero-3", each, BOTH | WHOLE) for each in FAMILIES],
    *[("follows", each, "untied", {}) for each in WRAPPERS[1:]],
    *[("follows", each, "tied", {}) for each in ("fsdp2", "fsdp1-flat")],
    # One flat parameter cannot be trained in part.
    *[("follows", each, "untied", LORA) for each in WRAPPERS if each != "fsdp1-flat"],
    *[("a_failure_is_raised_on_every_rank", each, "untied", {}) for each in WRAPPERS[1:]],
    *[("follows", "fsdp2", model, {}) for model in ("experts", *FAMILIES)],
    *[("follows", "fsdp2", model, {"adapters": names}) for model, names in FAMILIES.items()],
    *[
        ("reaches_tensor_parallel_ranks", "fsdp2", model, {})
        for model in ("tied", "one kv head", "experts")
    ],
    *[("reaches_tensor_parallel_ranks", "fsdp2", model, WHOLE) for model in FAMILIES],
    ("reaches_tensor_parallel_ranks", "fsdp2", "untied", CUT | LORA),
    ("reaches_tensor_parallel_ranks", "fsdp1", "untied", CUT),
]


def test_an_engine_follows_a_sharded_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASES", json.dumps(CASES))
    launch("tests.trainers.trainer_ranks", tmp_path, ranks=2)
