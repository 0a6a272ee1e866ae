"""Each step of a chain reads only its request's own rows: every row is computed again."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import ModelSpec
from spec_workers.budget import FixedBudget
from spec_workers.eagle import EagleWorker
from spec_workers.neural.drafter import NeuralDrafter
from spec_workers.target import TargetWorker
from tests.helpers.chain_watch import ChainWatch
from tests.helpers.compared import numbers
from tests.helpers.draft_checks import (
    PROMPTS,
    VOCAB,
    check_disturbed,
    plain_numbers,
)
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp

SAMPLED = SamplingParams(temperature=0.8, max_new_tokens=10, n=2, seed=3)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)
MODEL = {"vocab_size": VOCAB, "num_layers": 1, "sharpness": 4.0}
HEADS = [(6, 2, 8), (4, 4, 12), (3, 1, 16)]


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("target"), **MODEL)


@pytest.fixture(scope="module")
def chain_paths(tmp_path_factory):
    """Three networks of one step each, no two with pools of one shape."""
    folder = tmp_path_factory.mktemp("chains")
    return [
        save_tiny_mtp(folder / str(i), "separate", 1, heads=heads, likely=True, **MODEL)[1]
        for i, heads in enumerate(HEADS)
    ]


def make_engine(target_path, chain_paths, *, topk=2, num_draft_tokens=6, **options):
    """With a watch on its drafter."""

    def factory(config, progress=None):
        target = TargetWorker(config, progress, features=chains(config)[0].spec.features)
        drafter = NeuralDrafter(
            target,
            [chain.load(target.model)[0] for chain in chains(config)],
            num_steps=len(chain_paths),
            topk=topk,
            num_draft_tokens=num_draft_tokens,
        )
        for runner in drafter.runners:
            target.memory_saver.add_kv_pool(runner.kv.pool)
        return EagleWorker(target, drafter, budget=FixedBudget(0.01))

    def chains(config):
        spec = ModelSpec.read(target_path)
        return [MtpChain.find(path, spec) for path in chain_paths]

    small = {"num_threads": 1, "max_running": 5, "chunk_len": 9, "max_kv_tokens": 400}
    settings = small | {"dtype": "float32"} | options
    engine = RolloutEngine.from_config(engine_config(str(target_path), settings), factory)
    return engine, ChainWatch(engine.worker.drafter)


@pytest.mark.parametrize(
    ("topk", "options"),
    [(1, {}), (2, {}), (2, {"prefix_cache": False}), (1, {"max_step_tokens": 11})],
    ids=str,
)
def test_every_row_is_what_whole_sequences_give(target_path, chain_paths, topk, options):
    engine, watch = make_engine(target_path, chain_paths, topk=topk, **options)
    requests = 0
    for params in (SAMPLED, GREEDY):
        for _ in range(1 + (params is SAMPLED)):  # again: prompts are in the prefix cache
            rollouts = engine.generate(PROMPTS, params)
            assert numbers(rollouts) == plain_numbers(target_path, PROMPTS, params)
            engine.check_integrity()
            requests += len(rollouts)
            accepted = sum(r.stats.accepted for r in rollouts)
            assert accepted > 0.2 * sum(len(r.token_ids) for r in rollouts)
    assert min(watch.known) > 200
    assert min(watch.nodes[1:]) > 100
    if options.get("prefix_cache") is False:
        assert not any(map(any, watch.holes))
        # Every position once, but for those that wait for tokens to the end.
        assert watch.known == [watch.known[0] - step * requests for step in range(3)]
    else:
        # Siblings part behind the prompt: step k's last k + 1 positions of it are one's own.
        holes = [sum(passed) for passed in watch.holes]
        assert 0 < holes[0] < holes[1] < holes[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_between_and_within_steps(target_path, chain_paths, seed, monkeypatch):
    """Scarce slots, retractions, aborts, scoring, sleep, dropped prefixes, steps that fail, steps
    the budget keeps from the chain."""
    random = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.9, max_new_tokens=24, n=2, seed=seed)
    wanted = plain_numbers(target_path, PROMPTS, params)
    engine, watch = make_engine(target_path, chain_paths, max_kv_tokens=50)
    worker = engine.worker
    verify, observe = worker.target.verify, worker.observe

    def verify_sometimes(batch, trees):
        forwarded = verify(batch, trees)
        if random.random() < 0.1:
            raise RuntimeError("a hiccup")
        return forwarded

    def observe_sometimes(step):
        if random.random() < 0.9:
            observe(step)
        if random.random() < 0.05:
            raise RuntimeError("a hiccup, the chain's rows being run")

    monkeypatch.setattr(worker.target, "verify", verify_sometimes)
    monkeypatch.setattr(worker, "observe", observe_sometimes)
    check_disturbed(engine, PROMPTS, params, wanted, random)
    assert min(watch.nodes[1:]) > 100


def test_new_weights_of_the_target_meet_nothing_the_old_ones_gave(
    target_path, chain_paths, tmp_path
):
    """The watch computes with the weights there are."""
    engine, watch = make_engine(target_path, chain_paths)
    other = save_tiny_llama(tmp_path, **MODEL, seed=9)
    engine.generate(PROMPTS, SAMPLED)
    for options in ({}, {"flush_cache": False}):
        engine.submit(PROMPTS[3], SamplingParams(temperature=0.8, max_new_tokens=40, seed=3))
        for _ in range(6):
            engine.step()
        before = watch.nodes[-1]
        engine.update_weights_from_disk(str(other), selector="target", **options)
        while engine.has_unfinished:
            engine.step()
        assert watch.nodes[-1] > before
    assert numbers(engine.generate(PROMPTS, SAMPLED)) == plain_numbers(other, PROMPTS, SAMPLED)
    engine.check_integrity()


@pytest.mark.parametrize("what", ["pool", "table", "kv", "model", "_next_SK", "plan"])
def test_what_is_the_first_steps_cannot_serve_the_second(target_path, chain_paths, what):
    """Else none of these tests would notice."""
    engine, _ = make_engine(target_path, chain_paths)
    first, second = engine.worker.drafter.runners[:2]
    if what == "plan":
        plans = []
        make_first, make_second = first._plan, second._plan
        first._plan = lambda **rows: plans.append(make_first(**rows)) or plans[-1]
        second._plan = lambda **rows: plans[-1] if len(plans) > 6 else make_second(**rows)
    elif what in ("kv", "model"):
        setattr(second, what, getattr(first, what))
    elif what == "table":
        second.kv.table = first.kv.table
        second.table = first.table
    else:
        setattr(second.kv, what, getattr(first.kv, what))
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        engine.generate(PROMPTS, SAMPLED)


def test_what_is_kept_of_a_request_is_forgotten_with_it(target_path, chain_paths):
    engine, _ = make_engine(target_path, chain_paths)
    drafter = engine.worker.drafter
    state = drafter._state
    engine.submit(PROMPTS[3], SAMPLED)
    for _ in range(4):
        engine.step()
    assert (state._requests_Q >= 0).any()
    while engine.has_unfinished:
        engine.step()
    assert (state._requests_Q == -1).all()
    assert state._hidden_KQE.shape[:2] == (3, engine.worker.memory.req_to_token.max_rows)
