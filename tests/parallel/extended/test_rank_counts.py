"""Two, three and four ranks: the bits of one rank, whatever they run together or each."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import launch
from tests.helpers.pairwise import PairwiseDesign, Row
from tests.helpers.tensor_cases import FAMILIES
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.tiny_mtp import save_tiny_mtp
from tests.parallel.rank_checks import VOCABULARY, run

HEADS, KV_HEADS, HEAD_DIM = 12, 1, 4
LEARNED = {"budget": "fixed", "min_probability": 0.0}
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
Case = tuple[str, int, dict[str, Any]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """`ROWS` as cases, with models made for them."""
    root = tmp_path_factory.mktemp("models")
    llama = save_tiny_mtp(
        root, "mimo", 2, heads=(HEADS, KV_HEADS, HEAD_DIM), likely=True,
        num_heads=HEADS, num_kv_heads=KV_HEADS,
    )  # fmt: skip
    folders = {
        "llama": llama,
        "recurrent": save_tiny_hybrid(root / "recurrent", heads=(HEADS, KV_HEADS, 12, 12)),
        "experts": save_tiny_moe(root / "moe", num_heads=HEADS, num_kv_heads=KV_HEADS),
    }
    draft = {"draft_path": str(save_tiny_eagle3(root / "eagle", llama)), "topk": 2, "num_steps": 3}

    def case(row: Row) -> Case:
        spec_options = LEARNED if row["spec"] != "none" else {}
        if row["spec"] in ("eagle", "hybrid"):
            spec_options = spec_options | draft
        options = {
            "folder": str(folders[row["model"]]), "spec": row["spec"], "dtype": row["dtype"],
            "spec_options": spec_options, "prefix_cache": row["prefix cache"] == "on",
        }  # fmt: skip
        return "run", int(row["size"]), options | COMPANY[row["company"]]

    return [case(row) for row in ROWS]


@functools.cache
def alone(folder: str, dtype: str) -> dict[str, Any]:
    """Rollouts of one rank."""
    return run(folder, "none", dtype=dtype, max_running=1, prefix_cache=False)


def launched(cases: list[Case], folder: Path) -> list[list[dict[str, Any]]]:
    """By case, what each of its ranks gave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CASES", json.dumps(cases))
        ranks = launch("tests.parallel.rank_checks", folder, ranks=cases[0][1])
    return [[rank[i] for rank in ranks[:size]] for i, (_, size, _) in enumerate(cases)]


def test_ranks_have_the_bits_of_one(cases: list[Case], tmp_path: Path) -> None:
    preempted, accepted = 0, Counter()
    found_by_case = launched(cases, tmp_path)
    for row, (_, _, options), ranks in zip(ROWS, cases, found_by_case, strict=True):
        wanted = alone(options["folder"], options["dtype"])
        for found in ranks:
            assert found["rollouts"] == wanted["rollouts"], row
            assert found["scored"] == wanted["scored"], row
        found = ranks[0]
        preempted += found["preemptions"] if row["company"] == "scarce" else 0
        assert (found["hits"] > 0) == (row["prefix cache"] == "on"), row
        assert (found["drafted"] > 0) == (row["spec"] != "none"), row
        accepted[row["spec"]] += found["accepted"]
    assert preempted > 0
    assert min(accepted[spec] for spec in ("ngram", "mtp", "hybrid")) > 0


def test_every_family_on_two_ranks(tmp_path: Path) -> None:
    folders = {name: save(tmp_path / name) for name, save in FAMILIES.items()} | {
        "tied": save_tiny_llama(tmp_path / "tied", tied=True),
        "one kv head": save_tiny_llama(tmp_path / "one", num_kv_heads=1),
        "interleaved": save_tiny_hybrid(tmp_path / "interleaved", "qwen3_next"),
        "experts": save_tiny_moe(tmp_path / "experts"),
    }
    drafting = {"spec": "ngram", "spec_options": LEARNED, "max_running": 4, "chunk_len": 9}
    drafting |= {"dtype": "float32", "again": True}
    each = [{"folder": str(folder)} | drafting for folder in folders.values()]
    cases: list[Case] = [("run", 2, options) for options in each]
    for (_, _, options), ranks in zip(cases, launched(cases, tmp_path), strict=True):
        wanted = alone(options["folder"], options["dtype"])
        for found in ranks:
            assert found["rollouts"] == wanted["rollouts"], options
            assert found["scored"] == wanted["scored"], options
        assert ranks[0]["accepted"] > 0, options


def test_ranks_with_rows_of_their_own_have_the_bits_of_one_alone(tmp_path: Path) -> None:
    llama = save_tiny_llama(tmp_path / "llama", vocab_size=VOCABULARY)
    eagle = {"draft_path": str(save_tiny_eagle3(tmp_path / "eagle", llama))}
    chain = save_tiny_mtp(tmp_path, "mimo", 2, vocab_size=VOCABULARY)
    experts, hybrid = save_tiny_moe(tmp_path / "moe"), save_tiny_hybrid(tmp_path / "hybrid")
    tree = LEARNED | {"topk": 3, "num_draft_tokens": 8}
    rows = [
        (4, 2, "eagle", llama, "bfloat16", tree | eagle | {"num_steps": 3}),
        (4, 2, "ngram", llama, "float32", LEARNED),
        (4, 2, "ngram", experts, "float32", LEARNED),
        (3, 1, "hybrid", llama, "float32", tree | eagle | {"num_steps": 3}),
        (3, 1, "ngram", hybrid, "float32", LEARNED),
        (2, 1, "mtp", chain, "float32", tree | {"num_steps": None}),
    ]
    cases: list[Case] = [
        (
            "rows_are_those_of_one_rank_alone",
            size,
            {"folder": str(folder), "spec": spec, "dtype": dtype, "tensor": tensor} | options,
        )
        for size, tensor, spec, folder, dtype, options in rows
    ]
    ranks = launched(cases, tmp_path)
    for row, results in zip(rows, ranks, strict=True):
        assert sum(result["idle"] for result in results) > 0, row
    assert sum(result["accepted"] for results in ranks for result in results) > 0
