"""Prompts for neural drafts, plain decoding of them, and a run that is disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rollout import RolloutEngine, SamplingParams
from rollout.errors import OutOfMemoryError
from tests.helpers.compared import numbers

VOCAB = 61


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    shared = random.integers(3, VOCAB, 23).tolist()
    own = [random.integers(3, VOCAB, length).tolist() for length in (1, 2, 17)]
    return [*own, shared, [*shared, 9], shared[:12]]


PROMPTS = _prompts()
"""Prompts of six lengths, three of which have a prefix in common."""


def plain_numbers(
    target_path: Path, prompts: Sequence[list[int]], params: SamplingParams
) -> list[tuple[Any, ...]]:
    """The `numbers` of plain decoding."""
    return numbers(_plain_engine(target_path).generate(prompts, params))


@cache
def _plain_engine(path: Path) -> RolloutEngine:
    return RolloutEngine.from_pretrained(path, "none", num_threads=1)


def check_disturbed(
    engine: RolloutEngine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    wanted: Sequence[tuple[Any, ...]],
    random: np.random.Generator,
) -> None:
    """Retractions, aborts, scoring, sleep and dropped prefixes between steps, of which some fail.

    ``wanted``: `numbers` of all samples of all prompts.
    """
    every = [(index, sample) for index in range(len(prompts)) for sample in range(params.n)]
    missing = dict(zip(every, wanted, strict=True))
    for index, sample in every:
        engine.submit(prompts[index], params, prompt_index=index, sample_index=sample)
    victim = engine.submit(prompts[3], params, prompt_index=3, sample_index=7)
    steps = failed = 0
    while engine.has_unfinished:
        try:
            ended = engine.step()
        except RuntimeError:
            failed += 1
            continue
        for rollout in ended:
            if rollout.sample_index == 7:
                continue
            assert numbers([rollout]) == [missing.pop((rollout.prompt_index, rollout.sample_index))]
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
                    engine.score(prompts[4], prompts[2])
            case 3:
                engine.release_memory(["kv_cache"])
                engine.resume_memory()
            case 4 if steps > 10:
                engine.abort(victim.request_id)
    assert not missing
    assert failed
    assert engine.metrics().preemptions > 0
