"""OpenRLHF's own trainer, as installed, with our engines in place of vLLM's."""

from __future__ import annotations

import argparse
import runpy

import pytest

from rollout.trainers.openrlhf import stand_ins
from rollout.trainers.openrlhf.__main__ import main
from rollout.trainers.openrlhf.arguments import ARGUMENTS
from tests.frameworks.openrlhf.tiny_task import write_task
from tests.frameworks.openrlhf.trainer_run import TrainerRun, run_trainer

pytestmark = pytest.mark.timeout(6600)
FLOAT32 = "--specrollout.dtype float32"


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def column(run: TrainerRun, name: str) -> list[float]:
    return [step[name] for step in run.steps]


def assert_follows_the_trainer(run: TrainerRun, *, within: float) -> None:
    """Each step's rollouts are of the weights the step before left, and its logprobs theirs."""
    assert len(run.steps) == 3
    assert column(run, "specrollout/weight_version_min") == [0, 1, 2]
    assert column(run, "specrollout/weight_version_max") == [0, 1, 2]
    assert max(map(abs, column(run, "vllm_kl"))) < within


def test_flash_attn_is_not_installed():
    assert not stand_ins.is_installed("flash_attn")


def test_speculation_cannot_be_seen(task):
    """One step of all prompts: OpenRLHF shuffles them by a generator that it does not seed."""
    setting = (
        f"{FLOAT32} --ds.zero_stage 2 --data.max_samples 4 --rollout.n_samples_per_prompt 8"
        " --train.batch_size 32 --rollout.temperature 0.3 --data.max_len 128"
        " --rollout.max_new_tokens 96"
    )
    ngram = "--specrollout.spec ngram --specrollout.budget fixed"
    drafting = run_trainer(task, f"{setting} {ngram}", float32=True)
    plain = run_trainer(task, f"{setting} --specrollout.spec none", float32=True)
    assert column(drafting, "specrollout/accept_length")[0] > 1.02
    assert column(plain, "specrollout/accept_length") == [1.0]
    assert len(plain.queries) == 32
    assert sorted(drafting.queries) == sorted(plain.queries)


def test_zero_3_two_actors_two_engines_and_evaluation(task):
    run = run_trainer(
        task,
        f"{FLOAT32} --ds.zero_stage 3 --actor.num_gpus_per_node 2 --vllm.num_engines 2"
        f" --eval.dataset {task}/prompts.jsonl --eval.steps 2",
        float32=True,
    )
    assert_follows_the_trainer(run, within=1e-5)
    assert "Evaluation completed" in run.log


def test_zero_2_in_bfloat16(task):
    """Two implementations in bfloat16 differ by its rounding, token by token."""
    assert_follows_the_trainer(run_trainer(task, "--ds.zero_stage 2"), within=0.03)


@pytest.mark.parametrize("stage", [2, 3])
def test_exact_training_samples_from_the_policy_it_trains(task, stage):
    setting = f"--specrollout.exact_training true --ds.zero_stage {stage}"
    run = run_trainer(task, setting)
    assert_follows_the_trainer(run, within=1e-9)
    assert column(run, "vllm_kl") == [0.0] * 3


def test_a_colocated_engine_of_two_ranks_sleeps_and_agents_take_turns(task):
    """The ranks are on the GPUs of two actors."""
    run = run_trainer(
        task,
        f"{FLOAT32} --ds.zero_stage 2 --actor.num_gpus_per_node 2 --vllm.tensor_parallel_size 2"
        f" --train.colocate_all --vllm.enable_sleep --train.agent_func_path {task}/agent.py",
        float32=True,
    )
    assert_follows_the_trainer(run, within=1e-5)


def test_asynchronous_training_with_partial_rollouts(task):
    run = run_trainer(
        task,
        f"{FLOAT32} --ds.zero_stage 2 --train.async_enable --train.partial_rollout_enable"
        " --data.max_samples 16 --data.max_len 240 --rollout.max_new_tokens 200",
        float32=True,
    )
    assert len(run.steps) == 4
    first, last = run.steps[0], run.steps[-1]
    assert first["specrollout/weight_version_min"] == 0
    assert last["specrollout/weight_version_max"] >= 1
    assert abs(first["vllm_kl"]) < 1e-5  # later ones are a step behind the trainer by design


def test_mistakes_are_refused_before_anything_starts():
    with pytest.raises(SystemExit, match=r"--vllm\.tensor_parallel_size=0"):
        main(["--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "0"])


class ParserMadeError(Exception):
    pass


def test_arguments_are_those_of_the_parser(monkeypatch):
    """Names and defaults that we read beforehand, and that no abbreviation reaches ours alone."""
    stand_ins.install()

    def catch(parser, *rest):
        raise ParserMadeError(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", catch)
    with pytest.raises(ParserMadeError) as made:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    parser = made.value.args[0]
    theirs = {action.dest: action.default for action in parser._actions}
    for name, default in ARGUMENTS.items():
        assert theirs[name] == default
    for name in theirs.keys() - ARGUMENTS.keys():
        assert not [ours for ours in ARGUMENTS if ours.startswith(name)]
