"""Two ranks of one model: the bits of one rank, updates, and ranks that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launch import launch
from tests.helpers.tiny_draft import save_tiny_dflash, save_tiny_eagle3
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_model import save_tiny_llama
from tests.parallel.rank_checks import run

FIXED = {"budget": "fixed", "min_probability": 0.0}
LEARNED = {"calibration_seconds": 0.1, "min_probability": 0.0}  # by rank 0's times


def test_two_ranks_are_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = str(save_tiny_llama(tmp_path / "llama"))
    hybrid = str(save_tiny_hybrid(tmp_path / "hybrid"))
    other = str(save_tiny_llama(tmp_path / "other", seed=1))
    one_kv_head = str(save_tiny_llama(tmp_path / "one", num_kv_heads=1))
    draft = save_tiny_eagle3(tmp_path / "eagle", Path(llama))
    neural = FIXED | {"topk": 3, "num_steps": 3, "draft_path": str(draft)}
    block = str(save_tiny_dflash(tmp_path / "block", Path(llama), layers=(0, 1)))
    checks = {
        "an_update_reaches_all_ranks_or_none": {"other": other},
        "a_forward_that_fails_on_one_rank_is_run_again_by_none": {},
        "a_call_that_rank_0_is_refused_ends_no_rank": {},
        "ranks_that_were_not_started_alike_are_told_in_what": {"other": one_kv_head},
        "a_rank_that_is_gone_in_the_middle_of_an_update_ends_the_others": {},
    }
    together = {"spec": "ngram", "max_running": 4, "chunk_len": 9}
    runs = [
        {"folder": folder, "spec_options": drafts, "logit_rows": rows} | together
        for folder, drafts, rows in ((llama, FIXED, 9), (hybrid, FIXED, 1024), (llama, LEARNED, 9))
    ]
    runs.append({"folder": llama, "spec_options": neural, "logit_rows": 9, "spec": "hybrid"})
    blocks = FIXED | {"draft_path": block}
    runs.append({"folder": llama, "spec_options": blocks, "logit_rows": 9, "spec": "block"})
    cases = [
        *[("run", 2, options) for options in runs],
        *[
            ("ranks_capture_alike_or_not_at_all", 2, {"folder": llama, "fails_at": fails_at})
            for fails_at in (None, 2)
        ],
        ("ranks_that_are_not_exact_agree", 2, {"folder": hybrid}),
        *[(check, 2, {"folder": llama} | options) for check, options in checks.items()],
    ]
    monkeypatch.setenv("CASES", json.dumps(cases))
    ranks = launch("tests.parallel.rank_checks", tmp_path, ranks=2)
    for number, options in enumerate(runs):
        alone = run(options["folder"], "none", max_running=1, prefix_cache=False)
        for found in (rank[number] for rank in ranks):
            assert found["rollouts"] == alone["rollouts"]
            assert found["scored"] == alone["scored"]
        assert ranks[0][number]["accepted"] > 0 or options["spec_options"] is LEARNED
    first = len(runs)
    whole, failing = ([rank[first + case] for rank in ranks] for case in (0, 1))
    assert whole[0] == whole[1]
    assert sum(whole[0]["replays"]) > 0
    assert [rank["rollouts"] for rank in failing] == [whole[0]["rollouts"]] * 2
    assert [rank["captured"] for rank in failing] == [2, 1], "rank 0's second is thrown away"
    assert failing[0]["replays"] == [*failing[1]["replays"], 0]
    fast = [rank[first + 2] for rank in ranks]
    assert fast[0] == fast[1]
