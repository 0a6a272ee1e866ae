"""Two ranks of one model: the bits of one rank, updates, corpora, and ranks that fail."""

from __future__ import annotations

import json

import pytest

from rollout import RolloutEngine
from tests.helpers.launch import launch
from tests.helpers.tensor_cases import FAMILIES, PARAMS, PROMPTS, changed, numbers, stored
from tests.helpers.tiny_draft import save_tiny_eagle1
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_moe import save_tiny_moe


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    llama = save_tiny_llama(root / "llama")
    made = {
        "llama": llama,
        "tied": save_tiny_llama(root / "tied", tied=True),
        "other": save_tiny_llama(root / "other", seed=1),
        "one kv head": save_tiny_llama(root / "one", num_kv_heads=1),
        "hybrid": save_tiny_hybrid(root / "hybrid", "qwen3_5"),
        "interleaved": save_tiny_hybrid(root / "interleaved", "qwen3_next"),
        "experts": save_tiny_moe(root / "experts"),
        "eagle": save_tiny_eagle1(root / "eagle", llama),
        **{name: save(root / name) for name, save in FAMILIES.items()},
    }
    return {name: str(folder) for name, folder in made.items()}


@pytest.fixture(scope="module")
def ranks(folders, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSOR_RANKS", json.dumps(folders))
        folder = tmp_path_factory.mktemp("ranks")
        return launch("tests.helpers.tensor_ranks", folder, ranks=2)


def alone(folder: str, dtype: str = "float32") -> RolloutEngine:
    return RolloutEngine.from_pretrained(folder, "none", kv_bytes=1 << 20, dtype=dtype)


MODELS = {
    "float32": "llama",
    "bfloat16": "llama",
    "tied": "tied",
    "one kv head": "one kv head",
    "hybrid": "hybrid",
    "interleaved": "interleaved",
    "experts": "experts",
    **{name: name for name in FAMILIES},
}


@pytest.mark.parametrize("case", MODELS)
def test_the_bits_of_one_rank(case, folders, ranks):
    first, second = (rank[case] for rank in ranks)
    assert first == second
    assert all(first["same"].values()), first["same"]
    assert first["accepted"] > 0
    dtype = "bfloat16" if case == "bfloat16" else "float32"
    one = numbers(alone(folders[MODELS[case]], dtype).generate(PROMPTS, PARAMS))
    assert first["rollouts"] == one


def test_ranks_on_unlike_processors_run_the_same_rows(folders, ranks):
    first, second = (rank["unlike processors"] for rank in ranks)
    assert first == second
    one = numbers(alone(folders["llama"], "bfloat16").generate(PROMPTS, PARAMS))
    assert first["rollouts"] == one


def test_an_update_reaches_all_ranks_or_none(folders, ranks):
    first, second = (rank["updates"] for rank in ranks)
    assert first == second
    engine = alone(folders["llama"])
    before = engine.weights_digest()
    assert first["before"] == before
    engine.update_weights_from_tensor(changed(stored(folders["llama"])))
    assert first["from tensors"] == engine.weights_digest()
    one = numbers(engine.generate(PROMPTS, PARAMS))
    assert first["rollouts"] == one
    engine.update_weights_from_disk(folders["other"])
    assert first["from disk"] == first["unchanged"] == engine.weights_digest()
    assert first["version"] == 9
    assert first["serves"]
    assert first["sent"] == first["resumed"] == first["healed"] == before
    assert first["from shared memory"] == before
    assert [rank["own"]["updates"]["returned early"] for rank in ranks] == [False, False]


def test_what_fails_on_one_rank_fails_on_all(ranks):
    first, second = (rank["own"]["updates"] for rank in ranks)
    assert "wrong shape: model.norm.weight" in second["refused"]
    assert first["refused"].startswith("WeightUpdateError: rank 1: ")
    assert "wrong shape: model.norm.weight" in first["refused"]
    assert second["torn"] == "ZeroDivisionError"
    assert first["torn"].startswith("WeightUpdateError: rank 1: it failed")
    assert "torn" in first["why not"]
    assert "torn" in second["why not"]
    assert "nowhere" in second["missing"]
    assert first["missing"].startswith("WeightUpdateError: rank 1: ")


def test_a_corpus_is_published_on_all_ranks_in_one_step(ranks):
    first, second = (rank["corpora"] for rank in ranks)
    assert first == second
    assert first["published"] is not None
    assert dict(first["states"]) == {"late": "published", "both": "published", "broken": "failed"}


def test_ranks_that_were_asked_different_things_are_told(ranks):
    for rank in ranks:
        assert "step 2, before its forward" in rank["own"]["different calls"]


def test_a_step_that_fails_on_one_rank_is_run_again_by_none(ranks):
    first, second = (rank["own"]["failed step"] for rank in ranks)
    assert second["first"] == "ZeroDivisionError"
    assert second["second"] == (
        "ParallelError: rank 1 of 2: it failed in the middle of a step: ZeroDivisionError()"
    )
    assert (first["first"] or first["second"]) == (
        "ParallelError: rank 0 of 2: rank 1 has ended or left: it failed in the middle of a step: "
        "ZeroDivisionError(); end all ranks and start them again"
    )


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("version", "specrollout is 'specrollout 2.1' on rank 1 and 'specrollout 2.0' on rank 0"),
        ("configuration", "scheduler.max_running is 4 on rank 1 and 3 on rank 0"),
        ("worker", "spec is 'spec_workers.ngram' on rank 1 and 'spec_workers.none' on rank 0"),
        ("options", "spec.num_draft_tokens is 4 on rank 1 and 3 on rank 0"),
        ("model", "config.json.num_kv_heads is 1 on rank 1 and 2 on rank 0"),
    ],
)
def test_ranks_that_were_not_started_alike_are_told_in_what(ranks, case, named):
    for rank in ranks:
        assert rank["own"]["different"][case] == f"ParallelError: {named}: start all ranks alike"


def test_a_rank_without_memory_is_named_on_the_others(ranks):
    first, second = (rank["own"]["no memory"] for rank in ranks)
    assert "allocate memory" in second
    assert first.startswith("rank 0 of 2: rank 1 has ended or left: it failed while it started: ")
    assert "allocate memory" in first


def test_a_rank_that_is_gone_in_the_middle_of_an_update_ends_the_others(ranks):
    lost = ranks[0]["own"]["lost"]
    gone = "ParallelError: rank 0 of 2: rank 1 has ended or left; end all ranks and start them"
    assert lost["update"].startswith(gone)
    assert not lost["serves"]
    assert "torn" in lost["lost"]


def test_more_processes_than_ranks_are_several_models(tmp_path):
    first, second = [["0", "1"], ["2", "3"]]
    found = launch("tests.helpers.model_ranks", tmp_path, ranks=4)
    assert found == [[0, first], [1, first], [0, second], [1, second]]
