"""verl's own trainer with our rollouts: GRPO, FSDP2, float32 on both sides.

The oracle is verl's: the probabilities its trainer computes for the tokens we sampled.
"""

from __future__ import annotations

import re
import runpy
from collections import defaultdict

import pytest
from main_ppo import EXAMPLE, ROLLOUT, run_main_ppo

pytestmark = pytest.mark.timeout(6600)
TWO_RANKS = f"{ROLLOUT}.tensor_model_parallel_size=2"
NO_LEARNING = "actor_rollout_ref.actor.optim.lr=0"  # else weights are not those that sampled
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.v1.separate_async.num_warmup_batches=1",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=2",
    f"{ROLLOUT}.checkpoint_engine.backend=gloo",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=gloo_checkpoint_engine",
    "data.max_response_length=64",
    f"{ROLLOUT}.ignore_eos=True",  # a response of one token cannot be cut
)


def assert_probabilities_are_the_trainers(outcome, *, steps):
    diffs = [step["training/rollout_probs_diff_max"] for step in outcome.steps]
    assert len(diffs) == steps
    assert max(diffs) < 1e-6


def groups(outcome):
    """Step, prompt, and the texts and rewards of its samples, for each group advantages compare."""
    by_group = defaultdict(list)
    for sample in outcome.samples:
        group = sample["step"], sample["input"], sample["uid"].split("_")[0]
        by_group[group].append((sample["output"], sample["score"]))
    return sorted((step, prompt, sorted(rated)) for (step, prompt, _), rated in by_group.items())


def test_two_replicas_and_one_of_two_ranks(checkpoint, tmp_path):
    """Both make the same rollouts of the same weights, for the same groups."""
    two, one = (
        run_main_ppo(
            checkpoint,
            tmp_path / str(size),
            f"{ROLLOUT}.tensor_model_parallel_size={size}",
            workers=2,
        )
        for size in (1, 2)
    )
    reward = runpy.run_path(str(EXAMPLE))["compute_score"]
    for outcome in (two, one):
        assert_probabilities_are_the_trainers(outcome, steps=2)
        assert all(step["specrollout/accept_length"] > 1 for step in outcome.steps)
        for sample in outcome.samples:
            rated = reward(sample["input"], sample["output"], sample["gts"])
            assert sample["score"] == pytest.approx(rated)
        assert [len(samples) for _, _, samples in groups(outcome)] == [4] * 16
    first, second = ([group for group in groups(run) if group[0] == 1] for run in (two, one))
    assert first == second
    # The samples of the second step are those of other weights: the gradient's sums have another
    # order, and Adam's first step moves by its sign where it is next to nothing.
    grad_norms = [outcome.steps[0]["actor/grad_norm"] for outcome in (two, one)]
    assert grad_norms[0] > 0
    assert grad_norms[1] == pytest.approx(grad_norms[0], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_exact_training_samples_from_the_policy_it_trains(checkpoint, tmp_path, ranks):
    mode = () if ranks == 1 else ("trainer.v1.trainer_mode=colocate_async", NO_LEARNING)
    outcome = run_main_ppo(
        checkpoint,
        tmp_path,
        f"{ROLLOUT}.tensor_model_parallel_size={ranks}",
        f"+{ROLLOUT}.engine_kwargs.specrollout.exact_training=true",
        *mode,
        workers=2,
    )
    assert [step["training/rollout_probs_diff_max"] for step in outcome.steps] == [0.0, 0.0]


def test_colocate_async_on_a_replica_of_two_ranks(checkpoint, tmp_path):
    outcome = run_main_ppo(
        checkpoint,
        tmp_path,
        "trainer.v1.trainer_mode=colocate_async",
        TWO_RANKS,
        NO_LEARNING,
        f"{ROLLOUT}.engine_kwargs.specrollout.spec_options.budget=learned",
        workers=2,
    )
    assert_probabilities_are_the_trainers(outcome, steps=2)
    assert all(step["specrollout/accept_length"] >= 1 for step in outcome.steps)
    assert all("specrollout/saved_seconds" in step for step in outcome.steps)


def test_separate_async_with_rollouts_cut_by_updates(checkpoint, tmp_path):
    """Weights are sent to both ranks of a replica apart from the trainer, and requests cut."""
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text("- {name: held, _target_: held_agent_loop.HeldAgentLoop}")
    outcome = run_main_ppo(
        checkpoint,
        tmp_path,
        *SEPARATE,
        TWO_RANKS,
        NO_LEARNING,
        f"{ROLLOUT}.agent.default_agent_loop=held",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        workers=2,
        pretended_gpus=4,
        steps=3,
    )
    assert_probabilities_are_the_trainers(outcome, steps=3)
    assert re.search(r"replica 1: cut \d+ requests", outcome.worker_logs)
    spans = [step["training/off_policy/trajectory_spans/max"] for step in outcome.steps]
    assert spans[2] == 2  # what was held went on under later weights
    # Rollouts go on beside the steps: one may see none, or few forwards without drafts.
    assert max(step.get("specrollout/accept_length", 0) for step in outcome.steps) > 1
