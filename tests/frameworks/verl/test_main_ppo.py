"""verl's own trainer with our rollouts: GRPO, FSDP2, float32 on both sides.

The oracle is verl's: the probabilities its trainer computes for the tokens we sampled.
"""

from __future__ import annotations

import re
import runpy
from collections import defaultdict

import pytest
from main_ppo import EXAMPLE, ROLLOUT, run_main_ppo

pytestmark = pytest.mark.timeout(1600)
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.v1.separate_async.num_warmup_batches=1",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.checkpoint_engine.backend=gloo",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=gloo_checkpoint_engine",
)
LONG = ("data.max_response_length=200", f"{ROLLOUT}.ignore_eos=True")


def differences(outcome):
    assert outcome.return_code == 0, outcome.output[-4000:]
    return [step["training/rollout_probs_diff_max"] for step in outcome.steps]


def groups(outcome):
    """Step, prompt, and the texts and rewards of its samples, for each group advantages compare."""
    by_group = defaultdict(list)
    for sample in outcome.samples:
        group = sample["step"], sample["input"], sample["uid"].split("_")[0]
        by_group[group].append((sample["output"], sample["score"]))
    return sorted((step, prompt, sorted(rated)) for (step, prompt, _), rated in by_group.items())


@pytest.mark.timeout(3200)
def test_sync_with_one_worker_and_with_two(checkpoint, tmp_path):
    """Two replicas make the rollouts that one makes of the same weights, for the same groups."""
    one, two = (
        run_main_ppo(checkpoint, tmp_path / str(workers), workers=workers) for workers in (1, 2)
    )
    reward = runpy.run_path(str(EXAMPLE))["compute_score"]
    for outcome, workers in ((one, 1), (two, 2)):
        diffs = differences(outcome)
        assert len(diffs) == 2
        assert max(diffs) < 1e-6
        accepted = re.findall(r"replica (\d), step \d: .* (\d+) of \d+ draft", outcome.output)
        assert {int(replica) for replica, _ in accepted} == set(range(workers))
        assert sum(int(count) for _, count in accepted) > 0
        for sample in outcome.samples:
            rated = reward(sample["input"], sample["output"], sample["gts"])
            assert sample["score"] == pytest.approx(rated)
    for outcome in (one, two):
        assert [len(samples) for _, _, samples in groups(outcome)] == [4] * 16
    first, second = ([group for group in groups(run) if group[0] == 1] for run in (one, two))
    assert first == second
    # The samples of the second step are those of other weights: the gradient's sums have another
    # order, and Adam's first step moves by its sign where it is next to nothing.
    grad_norms = [outcome.steps[0]["actor/grad_norm"] for outcome in (one, two)]
    assert grad_norms[0] > 0
    assert grad_norms[1] == pytest.approx(grad_norms[0], rel=1e-4)


def test_a_replica_of_two_ranks_on_the_devices_of_two_workers(checkpoint, tmp_path):
    overrides = [f"{ROLLOUT}.tensor_model_parallel_size=2"]
    outcome = run_main_ppo(checkpoint, tmp_path, *overrides, workers=2)
    diffs = differences(outcome)
    assert len(diffs) == 2
    assert max(diffs) < 1e-6
    assert set(re.findall(r"replica (\d), step", outcome.output)) == {"0"}


def test_separate_async_with_rollouts_cut_by_updates(checkpoint, tmp_path):
    """Weights are sent and requests cut; the learning rate is 0, so the oracle still holds."""
    still = "actor_rollout_ref.actor.optim.lr=0"
    outcome = run_main_ppo(
        checkpoint,
        tmp_path,
        *(*SEPARATE, *LONG, still),
        steps=4,
        workers=2,
        pretended_gpus=3,
    )
    diffs = differences(outcome)
    assert len(diffs) == 4
    assert max(diffs) < 1e-6
    assert re.search(r"replica \d: cut \d+ requests", outcome.output)
    spans = [step["training/off_policy/trajectory_spans/max"] for step in outcome.steps]
    assert max(spans) > 1  # some went on under later weights


def test_what_cannot_be_honoured_stops_the_run_at_its_start(checkpoint, tmp_path):
    outcome = run_main_ppo(checkpoint, tmp_path, f"{ROLLOUT}.quantization=fp8")
    assert outcome.return_code != 0
    assert not outcome.steps
    assert f"{ROLLOUT}.quantization='fp8'" in outcome.output
