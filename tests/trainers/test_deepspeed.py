"""DeepSpeed's weights in the engine: ZeRO-0 to 3, one rank and two, real engines over gloo."""

from __future__ import annotations

import os

import pytest
from torch.utils.file_baton import FileBaton

from tests.helpers.forked import forked
from tests.helpers.launch import launch
from tests.helpers.tiny_trainers import FAMILIES
from tests.helpers.trainer_checks import assert_follows, assert_sent_in_slices

pytest.importorskip("deepspeed")

BUCKET_BYTES = 24 * 1024  # as in deepspeed_ranks.py
FLOAT32_BYTES = {"untied": 179_520, "tied": 160_896}


@pytest.fixture(scope="module", params=[1, 2])
def by_rank(request, tmp_path_factory):
    """Each rank's measurements."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return launch("tests.trainers.deepspeed_ranks", folder, ranks=request.param)


@pytest.mark.parametrize("case", ["0", "1", "2", "3", "3-tied"])
def test_the_engine_has_the_trainers_weights(by_rank, case):
    for rank, results in enumerate(by_rank):
        result = results[f"follows-{case}"]
        tied = case.endswith("tied")
        assert result["num_tensors"] == 21 - tied
        assert result["num_bytes"] == FLOAT32_BYTES["tied" if tied else "untied"]
        assert result["version"] == 1
        assert_follows(result, rank)


def test_experts_are_fused_in_the_trainers_memory(by_rank):
    for rank, results in enumerate(by_rank):
        assert_follows(results["follows-3-experts"], rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_followed(by_rank, family):
    if len(by_rank) == 1:
        pytest.skip("run on two ranks")
    for rank, results in enumerate(by_rank):
        assert_follows(results[f"follows-3-{family}"], rank)
        for dtype in ("bfloat16", "float32"):
            assert results[f"tensor-3-{family}"][dtype]["same"]


def test_no_more_than_a_bucket_is_gathered(by_rank):
    for results in by_rank:
        assert 0 < results["follows-3"]["peak"] <= BUCKET_BYTES
        assert results["follows-3"]["whole_after"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", ["tensor-3", "tensor-3-experts"])
def test_shards_go_to_tensor_parallel_ranks_without_a_whole_tensor(by_rank, case, dtype):
    """float32 is the optimizer's copy."""
    if len(by_rank) == 1:
        pytest.skip("run on two ranks")
    for results in by_rank:
        assert_sent_in_slices(results[case][dtype], BUCKET_BYTES)


@pytest.mark.parametrize("stage", range(4))
def test_the_master_copy_comes_on_request(by_rank, stage):
    for rank, results in enumerate(by_rank):
        result = results[f"master-{stage}"]
        assert result["num_bytes"] == FLOAT32_BYTES["untied"] // 2
        assert result["specs_hold"]
        assert result["rounds_to_model"]
        assert result["finer"] > 0
        if rank == 0:
            assert result["same_digest"]


def test_adapters_are_gathered_with_their_base_and_merged(by_rank):
    if len(by_rank) == 1:
        pytest.skip("run on two ranks")
    for rank, results in enumerate(by_rank):
        result = results["lora-3"]
        assert result["num_tensors"] == 21
        assert result["num_bytes"] == FLOAT32_BYTES["untied"]
        if rank == 0:
            assert result["gap"] < 1e-5
            assert result["same_digest"]


def test_a_failure_is_raised_on_every_rank(by_rank):
    if len(by_rank) == 1:
        pytest.skip("one rank tells no other")
    first, last = (results["failures-3"] for results in by_rank)
    for takes in ("0", "1", "2", "9", "20", "21", "1000"):
        assert "failed on rank 1" in first["raised"][takes]
        assert last["raised"][takes] == "this engine fails on purpose"
    assert first["version"] == last["version"] == 1
    assert first["gap"] < 1e-5
    assert first["nobody"] == last["nobody"] == "engine"
    assert not first["serves"]


@pytest.mark.parametrize("stage", [2, 3])
def test_attached_to_the_engine_it_syncs_after_whole_steps(by_rank, stage):
    if stage == 2 and len(by_rank) == 2:
        pytest.skip("run on one rank")
    for rank, results in enumerate(by_rank):
        result = results[f"callbacks-{stage}"]
        # Two micro-batches make a step, two steps a sync.
        assert rank or result["versions"] == [0, 0, 0, 1, 1, 1, 1, 2]
        assert result["num_steps"] == 4
        assert all(result["old_inside_the_optimizer"])
        assert result["refused"] == ["stepper", "stepper"]


@pytest.mark.parametrize("is_set", [True, False])
def test_locks_of_compilations_that_died_are_removed(monkeypatch, tmp_path, is_set):
    root = tmp_path if is_set else tmp_path / "py311_cpu"
    if is_set:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    else:
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr("rollout.trainers.deepspeed.get_default_build_root", lambda: tmp_path)
    left, held = (root / name / "lock" for name in ("cpu_adam", "fused_adam"))
    for lock in (left, held):
        lock.parent.mkdir(parents=True)
    from rollout.trainers.deepspeed import prepare_deepspeed  # which imports deepspeed

    died = forked(compile_and_die, str(left))
    died.join()
    assert left.exists(), "torch would wait for it for ever"
    compiling = FileBaton(str(held))
    assert compiling.try_acquire()
    prepare_deepspeed()
    assert not left.exists()
    assert held.exists(), "this process compiles there"
    compiling.release()


def compile_and_die(lock):
    assert FileBaton(lock).try_acquire()
    os._exit(1)
