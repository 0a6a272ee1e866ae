"""Ranks with requests of their own and a part of every MLP: the bits of one rank alone."""

from __future__ import annotations

import json

import pytest

from tests.helpers.launch import launch
from tests.helpers.row_ranks import VOCABULARY
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.tiny_mtp import save_tiny_mtp

TREE = {"budget": "fixed", "num_steps": 3, "topk": 3, "num_draft_tokens": 8, "min_probability": 0.0}
COPYING = {"budget": "fixed", "min_probability": 0.0}


@pytest.mark.parametrize(("size", "tensor_size"), [(2, 1), (3, 1), (4, 2)])
def test_every_number_is_that_of_one_rank_alone(size, tensor_size, tmp_path, monkeypatch):
    llama = save_tiny_llama(tmp_path / "llama", vocab_size=VOCABULARY)
    eagle = save_tiny_eagle3(tmp_path / "eagle", llama)
    chain, _ = save_tiny_mtp(tmp_path, "mimo", 2, vocab_size=VOCABULARY)
    workers = [
        ("none", llama, {}, "bfloat16"),
        ("ngram", llama, COPYING, "float32"),
        ("hybrid", llama, {"draft_path": str(eagle), **TREE}, "float32"),
        ("eagle", llama, {"draft_path": str(eagle), **TREE}, "bfloat16"),
        ("mtp", chain, {**TREE, "num_steps": None}, "float32"),
        ("ngram", save_tiny_moe(tmp_path / "moe"), COPYING, "float32"),
        ("ngram", save_tiny_hybrid(tmp_path / "hybrid"), COPYING, "float32"),
    ]
    cases = [
        {"spec": spec, "target": str(target), "options": options, "dtype": dtype}
        for spec, target, options, dtype in (workers if size != 3 else workers[2:3] + workers[5:])
    ]
    monkeypatch.setenv("ROW_RANKS", json.dumps(cases))
    monkeypatch.setenv("ROW_RANKS_TENSOR", str(tensor_size))
    ranks = launch("tests.helpers.row_ranks", tmp_path, ranks=size)
    for index, case in enumerate(cases):
        results = [rank[index] for rank in ranks]
        for rank, result in enumerate(results):
            assert all(result["same"].values()), (case["spec"], rank, result["same"])
        assert sum(result["idle"] for result in results) > 0
    assert sum(result["accepted"] for rank in ranks for result in rank) > 0
