"""FSDP1, FSDP2 and DDP weights in the engine: two ranks over gloo."""

from __future__ import annotations

import pytest

from tests.helpers.launch import launch
from tests.helpers.tiny_trainers import FAMILIES
from tests.helpers.trainer_checks import assert_follows, assert_sent_in_slices

pytest.importorskip("peft")

BUCKET_BYTES = 24 * 1024  # as in fsdp_ranks.py
UNIT_BYTES = 71_040  # a decoder layer


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """Each rank's measurements."""
    folder = tmp_path_factory.mktemp("fsdp")
    return launch("tests.trainers.fsdp_ranks", folder, ranks=2)


@pytest.mark.parametrize("kind", ["", "-tied", "-lora"])
@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "fsdp1-flat", "ddp"])
def test_the_engine_has_the_trainers_weights(by_rank, wrapper, kind):
    if (wrapper, kind) == ("fsdp1-flat", "-lora"):
        pytest.skip("one flat parameter cannot be trained in part")
    for rank, results in enumerate(by_rank):
        result = results[wrapper + kind]
        assert result["num_tensors"] == 21 - (kind == "-tied")
        assert result["num_bytes"] == (160_896 if kind == "-tied" else 179_520)
        assert result["version"] == 1
        assert_follows(result, rank)


def test_experts_are_fused_in_the_trainers_memory(by_rank):
    for rank, results in enumerate(by_rank):
        assert_follows(results["fsdp2-experts"], rank)


@pytest.mark.parametrize("kind", ["", "-lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_followed(by_rank, family, kind):
    for rank, results in enumerate(by_rank):
        assert_follows(results[f"fsdp2-{family}{kind}"], rank)


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "fsdp1-flat"])
def test_no_more_than_a_bucket_or_a_unit_is_gathered(by_rank, wrapper):
    allowed = BUCKET_BYTES if wrapper == "fsdp2" else UNIT_BYTES
    for results in by_rank:
        assert allowed * 0.7 < results[wrapper]["peak"] <= allowed + 1024  # torch pads shards


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "fsdp1-flat", "ddp"])
def test_a_failure_is_raised_on_every_rank(by_rank, wrapper):
    first, last = (results[f"{wrapper}-failures"] for results in by_rank)
    for takes in ("0", "1", "9", "21", "1000"):
        assert "failed on rank 1" in first["raised"][takes]
        assert last["raised"][takes] == "this engine fails on purpose"
    assert first["gap"] < 1e-5


def test_mixed_precision_streams_the_masters(by_rank):
    for results in by_rank:
        assert results["mixed"] == {"masters": True, "halves": True}


def test_the_first_sync_may_follow_a_forward(by_rank):
    for results in by_rank:
        assert results["after a forward"]["num_tensors"] == 21
        assert results["after a forward"]["gap"] < 1e-5


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2-tied", "fsdp2-one", "fsdp2-experts"])
def test_shards_go_to_tensor_parallel_ranks_without_a_whole_tensor(by_rank, kind):
    for results in by_rank:
        assert_sent_in_slices(results[f"tensor-{kind}"], BUCKET_BYTES)


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_other_families_go_to_tensor_parallel_ranks(by_rank, family):
    """Latents, and experts in one tensor of which a rank wants a part of each, are gathered."""
    for results in by_rank:
        assert results[f"tensor-fsdp2-{family}"]["same"]


@pytest.mark.parametrize("kind", ["fsdp2-lora", "fsdp1"])
def test_what_has_to_be_gathered_is_cut_after_that(by_rank, kind):
    for results in by_rank:
        result = results[f"tensor-{kind}"]
        assert result["same"]
        assert result["num_bytes"] < 0.6 * result["whole_bytes"]


def test_what_one_rank_of_the_engine_refuses_reaches_none(by_rank):
    first, last = (results["tensor-fails"] for results in by_rank)
    assert "this worker has" in last["raised"]
    assert first["raised"].startswith("rank 1: ")
    assert all(each["same"] and each["serves"] for each in (first, last))


def test_any_part_of_any_shard_can_be_sent(by_rank):
    assert all(results["exchanges"] for results in by_rank)
