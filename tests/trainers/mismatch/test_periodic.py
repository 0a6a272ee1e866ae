"""Comparisons while a trainer runs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout import SamplingParams
from rollout.errors import InvalidInputError
from rollout.trainers.mismatch import Cause
from rollout.trainers.mismatch import periodic as periodic_module
from rollout.trainers.mismatch.periodic import PeriodicProbe
from tests.trainers.mismatch.conftest import Pair


def test_a_probe_takes_no_more_than_its_share(windowed: Pair, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(periodic_module.time, "perf_counter", lambda: now[0])

    def compared(*args: object, **options: object):
        now[0] += 3.0
        return real(*args, **options)

    real = periodic_module.compare
    monkeypatch.setattr(periodic_module, "compare", compared)
    probe, at = PeriodicProbe(windowed.engine, every=5, max_share=0.1), []
    model = windowed.model()
    for step in range(60):
        if probe.step(model, windowed.sampled) is not None:
            at.append(step)
        now[0] += 1.0
    # 3 seconds each: the second is due once 6 of them are a tenth of the time.
    assert at == [4, 59]


def test_a_suspect_is_logged_and_rounding_is_not(windowed: Pair, caplog) -> None:
    probe = PeriodicProbe(windowed.engine, every=1, max_share=1.0)
    model = windowed.model()
    with caplog.at_level(logging.WARNING):
        probe.compare(model, windowed.sampled)
        assert not caplog.records
        model.model.layers[0].mlp.down_proj.weight.data.mul_(1.01)
        found = probe.compare(model, windowed.sampled)
    assert found.suspects[0].cause is Cause.STALE_WEIGHTS
    assert "stale_weights: model.layers.0.mlp.down_proj.weight" in caplog.text


def test_a_rollout_without_tokens_is_passed_over(windowed: Pair) -> None:
    ended = replace(windowed.sampled[0], token_ids=[], logprobs=[], weight_versions=[])
    model = windowed.model()
    for rollouts, num_tokens in (([], 0), ([ended], 0), ([ended, *windowed.sampled], 30)):
        found = PeriodicProbe(windowed.engine, every=1).step(model, rollouts)
        assert (0 if found is None else found.tokens) == num_tokens


@pytest.mark.parametrize("options", [{"every": 0}, {"max_share": 2.0}])
def test_settings_are_checked(windowed: Pair, options) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        PeriodicProbe(windowed.engine, **options)


def test_the_callback_of_trl_compares_after_a_sync(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from rollout.trainers.trl import MismatchProbe
    from tests.helpers.trl_runs import assert_same_run, by_generation, run

    plain = run(by_generation(model, tmp_path / "plain"))
    trainer = by_generation(model, tmp_path / "probed")
    engine = trainer.vllm_generation.engine
    probe = MismatchProbe(engine, every=1, max_share=1.0)
    trainer.add_callback(probe)
    probed = run(trainer)
    assert_same_run(plain, probed)
    assert probe.probe.last is not None
    assert probe.probe.last.suspects == []
    differences = probed.column("specrollout/mismatch")
    assert differences
    assert all(0 < each < 2e-5 for each in differences)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
    rollouts = engine.generate([[3, 4]], SamplingParams(max_new_tokens=8))
    found = probe.probe.compare(trainer.model, rollouts)
    assert found.suspects[0].cause is Cause.STALE_WEIGHTS
