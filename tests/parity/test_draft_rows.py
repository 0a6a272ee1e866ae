"""Each step of a draft reads only its request's own rows: every row is computed again from whole
sequences (`ChainWatch`), whatever happens between steps and within."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.errors import OutOfMemoryError
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import ModelSpec
from spec_workers.budget import FixedBudget
from spec_workers.eagle import EagleWorker
from spec_workers.neural.drafter import NeuralDrafter
from spec_workers.target import TargetWorker
from tests.helpers.chain_watch import ChainWatch
from tests.helpers.compared import numbers
from tests.helpers.tiny_draft import save_copying_eagle1, save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp

VOCAB = 61
MODEL = {"vocab_size": VOCAB, "num_layers": 1, "sharpness": 4.0}
HEADS = [(6, 2, 8), (4, 4, 12), (3, 1, 16)]
SAMPLED = SamplingParams(temperature=0.8, max_new_tokens=10, n=2, seed=3)


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    shared = random.integers(3, VOCAB, 23).tolist()
    own = [random.integers(3, VOCAB, length).tolist() for length in (1, 2, 17)]
    return [*own, shared, [*shared, 9], shared[:12]]


PROMPTS = _prompts()
"""Prompts of six lengths, three of which have a prefix in common."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("target"), **MODEL)


@pytest.fixture(scope="module")
def make_engine(target, tmp_path_factory):
    """Engines by kind of draft, and the watch on their drafter: ``eagle`` guesses well, ``chain``
    is three networks of one step each, no two with pools of one shape."""
    folder = tmp_path_factory.mktemp("drafts")
    small = {"num_threads": 1, "max_running": 5, "chunk_len": 9, "dtype": "float32"}
    drafts = {
        "eagle": save_copying_eagle1(folder / "eagle", target),
        "eagle3": save_tiny_eagle3(
            folder / "eagle3", target, layers=(0, 1), draft_vocab_size=40, unsorted=True
        ),
    }
    chains = [
        MtpChain.find(
            save_tiny_mtp(folder / str(heads), "mimo", 1, heads=heads, likely=True, **MODEL),
            replace(
                ModelSpec.read(target),
                **dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True)),
            ),
        )
        for heads in HEADS
    ]

    def chain_worker(config, progress=None):
        worker = TargetWorker(config, progress, features=chains[0].spec.features)
        steps = [chain.load(worker.model)[0] for chain in chains]
        drafter = NeuralDrafter(worker, steps, num_steps=3, topk=2, num_draft_tokens=6)
        for runner in drafter.runners:
            worker.memory_saver.add_kv_pool(runner.kv.pool)
        return EagleWorker(worker, drafter, budget=FixedBudget(0.01))

    def make(kind: str, **options) -> tuple[RolloutEngine, ChainWatch]:
        options = small | options
        if kind == "chain":
            config = engine_config(str(target), {"max_kv_tokens": 400} | options)
            engine = RolloutEngine.from_config(config, chain_worker)
        else:
            own = {"draft_path": str(drafts[kind]), "budget": "fixed", "topk": 2, "num_steps": 3}
            engine = RolloutEngine.from_pretrained(target, "eagle", spec_options=own, **options)
        return engine, ChainWatch(engine.worker.drafter)

    return make


@pytest.fixture(scope="module")
def plain(target) -> Callable[..., list]:
    """The `numbers` of plain decoding of all prompts."""

    @cache
    def engine_of(path) -> RolloutEngine:
        return RolloutEngine.from_pretrained(path, "none", num_threads=1)

    def decoded(params: SamplingParams, path=target) -> list:
        return numbers(engine_of(path).generate(PROMPTS, params))

    return decoded


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle", {}), ("eagle", {"prefix_cache": False}), ("eagle3", {"max_step_tokens": 11}),
        ("chain", {}), ("chain", {"prefix_cache": False}),
    ],
    ids=str,
)  # fmt: skip
def test_every_row_is_what_whole_sequences_give(make_engine, plain, kind, options):
    engine, watch = make_engine(kind, **options)
    requests = 0
    for _ in range(2):  # again: prompts are in the prefix cache
        rollouts = engine.generate(PROMPTS, SAMPLED)
        assert numbers(rollouts) == plain(SAMPLED)
        engine.check_integrity()
        requests += len(rollouts)
    if kind == "chain":
        assert sum(r.stats.accepted for r in rollouts) > 0.2 * sum(
            len(r.token_ids) for r in rollouts
        )
    assert min(watch.known) > 100
    assert min(watch.nodes[1:] or watch.nodes) > 100
    holes = [sum(passed) for passed in watch.holes]
    if "prefix_cache" in options:
        assert not any(holes)
        # Every position once, but for those that wait for tokens to the end.
        steps = len(watch.known)
        assert watch.known == [watch.known[0] - step * requests for step in range(steps)]
    elif kind == "chain":
        # Siblings part behind the prompt: step k's last k + 1 positions of it are one's own.
        assert 0 < holes[0] < holes[1] < holes[2]
    else:
        assert 0 < holes[0] / len(watch.holes[0]) < 2


@pytest.mark.parametrize("kind", ["eagle", "chain"])
def test_whatever_happens_between_and_within_steps(make_engine, plain, kind, monkeypatch):
    """Scarce slots, retractions, aborts, scoring, sleep, dropped prefixes, steps that fail, steps
    that the budget keeps from the draft."""
    random = np.random.default_rng(2)
    params = SamplingParams(temperature=0.9, max_new_tokens=24, n=2, seed=2)
    missing = dict(zip(np.ndindex(len(PROMPTS), params.n), plain(params), strict=True))
    engine, watch = make_engine(kind, max_kv_tokens=50)
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
            raise RuntimeError("a hiccup, the draft's rows being run")

    monkeypatch.setattr(worker.target, "verify", verify_sometimes)
    monkeypatch.setattr(worker, "observe", observe_sometimes)
    for index, sample in missing:
        engine.submit(PROMPTS[index], params, prompt_index=index, sample_index=sample)
    victim = engine.submit(PROMPTS[3], params, prompt_index=3, sample_index=7)
    steps = failed = 0
    while engine.has_unfinished:
        try:
            ended = engine.step()
        except RuntimeError:
            failed += 1
            continue
        for rollout in ended:
            if rollout.sample_index != 7:
                key = rollout.prompt_index, rollout.sample_index
                assert numbers([rollout]) == [missing.pop(key)]
        engine.check_integrity()
        steps += 1
        match random.integers(0, 24):
            case 0:
                engine.flush_cache()
            case 1:
                engine.pause_generation("retract")
                engine.continue_generation()
            case 2:
                with suppress(OutOfMemoryError):
                    engine.score(PROMPTS[4], PROMPTS[2])
            case 3:
                engine.release_memory(["kv_cache"])
                engine.resume_memory()
            case 4 if steps > 10:
                engine.abort(victim.request_id)
    assert not missing
    assert failed
    assert engine.metrics().preemptions > 0
    assert min(watch.nodes[1:] or watch.nodes) > 100


def test_new_weights_of_the_target_meet_nothing_the_old_ones_gave(make_engine, plain, tmp_path):
    """The watch computes with the weights there are, also where the target's KV is kept."""
    engine, watch = make_engine("chain")
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
    assert numbers(engine.generate(PROMPTS, SAMPLED)) == plain(SAMPLED, other)


def test_new_weights_of_the_draft_meet_nothing_it_computed(make_engine, plain):
    """The target's KV and its prefix cache stay."""
    engine, watch = make_engine("eagle")
    assert numbers(engine.generate(PROMPTS, SAMPLED)) == plain(SAMPLED)
    engine.submit(PROMPTS[3], SAMPLED)
    for _ in range(6):
        engine.step()
    loaders = engine.worker.drafter.runners[0].model.weight_loaders()
    engine.update_weights_from_tensor(
        [(name, loader.read() * 1.3) for name, loader in loaders.items()], selector="draft"
    )
    while engine.has_unfinished:
        engine.step()
    watch.holes[0].clear()
    assert numbers(engine.generate(PROMPTS, SAMPLED)) == plain(SAMPLED)
    assert max(watch.holes[0]) > 8  # cached for the target, not read again by the draft
