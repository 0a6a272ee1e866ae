"""Two, three and four tensor-parallel ranks: the bits of one rank, whatever it runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest

from tests.helpers.launch import launch
from tests.helpers.pairwise import PairwiseDesign, Row
from tests.helpers.rank_counts import RankCase, run
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.tiny_mtp import save_tiny_mtp

HEADS, KV_HEADS, HEAD_DIM = 12, 1, 4
COMPANY = {
    "many": {"max_running": 8},
    "chunks": {"max_running": 4, "chunk_len": 5},
    "scarce": {"max_running": 8, "max_kv_tokens": 48},
}
FACTORS = {
    "size": ("2", "3", "4"),
    "spec": ("none", "ngram", "eagle", "mtp", "hybrid"),
    "model": ("llama", "recurrent", "experts"),
    "dtype": ("float32", "bfloat16"),
    "company": tuple(COMPANY),
    "prefix cache": ("on", "off"),
}


def is_possible(row: Row) -> bool:
    """Only the Llama has drafts with weights here. Two ranks run the others elsewhere."""
    is_llama = row.get("model", "llama") == "llama"
    if row.get("size") == "2":
        return is_llama and row.get("spec") not in ("none", "ngram")
    return is_llama or row.get("spec", "none") in ("none", "ngram")


ROWS = sorted(PairwiseDesign(FACTORS, is_possible).rows(), key=lambda row: row["size"])[::-1]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    llama, _ = save_tiny_mtp(
        root, "mimo", 2, heads=(HEADS, KV_HEADS, HEAD_DIM), likely=True,
        num_heads=HEADS, num_kv_heads=KV_HEADS,
    )  # fmt: skip
    folders = {
        "llama": llama,
        "recurrent": save_tiny_hybrid(root / "recurrent", heads=(HEADS, KV_HEADS, 12, 12)),
        "experts": save_tiny_moe(root / "moe", num_heads=HEADS, num_kv_heads=KV_HEADS),
    }
    draft = {"draft_path": str(save_tiny_eagle3(root / "eagle", llama)), "topk": 2, "num_steps": 3}

    def case(row: Row) -> RankCase:
        learned = {"budget": "fixed", "min_probability": 0.0}
        spec_options = learned if row["spec"] != "none" else {}
        if row["spec"] in ("eagle", "hybrid"):
            spec_options = spec_options | draft
        return RankCase(
            size=int(row["size"]),
            target=str(folders[row["model"]]),
            spec=row["spec"],
            spec_options=spec_options,
            options=COMPANY[row["company"]]
            | {"dtype": row["dtype"], "prefix_cache": row["prefix cache"] == "on"},
        )

    return [case(row) for row in ROWS]


def test_ranks_have_the_bits_of_one(cases, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK_COUNTS", json.dumps([asdict(case) for case in cases]))
    ranks = launch("tests.helpers.rank_counts", tmp_path, ranks=4)
    wanted, preempted, accepted = {}, 0, Counter()
    for number, (row, case) in enumerate(zip(ROWS, cases, strict=True)):
        plain = row["model"], row["dtype"]
        if plain not in wanted:
            options = {"dtype": row["dtype"], "max_running": 1, "prefix_cache": False}
            alone = replace(case, size=1, spec="none", spec_options={}, options=options)
            wanted[plain] = run(alone)
        for rank in range(case.size):
            found = ranks[rank][number]
            assert found["rollouts"] == wanted[plain]["rollouts"], row
            assert found["scored"] == wanted[plain]["scored"], row
        preempted += found["preemptions"] if row["company"] == "scarce" else 0
        assert (found["hits"] > 0) == (row["prefix cache"] == "on"), row
        assert (found["drafted"] > 0) == (row["spec"] != "none"), row
        accepted[row["spec"]] += found["accepted"]
    assert preempted > 0
    assert min(accepted[spec] for spec in ("ngram", "mtp", "hybrid")) > 0


def test_any_two_values_meet():
    design = PairwiseDesign(FACTORS, is_possible)
    assert {pair for row in ROWS for pair in design.pairs_of(row)} == set(design.pairs())
    assert len(ROWS) < 20
