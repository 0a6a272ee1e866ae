"""Neural drafts beside the matrix: flickering gates, broken logits, levels that do not pay."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutEngine
from spec_workers.budget import FixedBudget
from tests.helpers.compared import numbers
from tests.helpers.gates import FlickeringGate, ShutGate
from tests.helpers.parity_models import FIXED, LEARNED, PARAMS, prompts


def make_engine(models, spec, kind, spec_options, **options) -> RolloutEngine:
    draft = models.draft("shallow", kind)
    return RolloutEngine.from_pretrained(
        models.target("shallow"), spec, **options,
        spec_options={"draft_path": draft and str(draft)} | spec_options,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "seed"), [("eagle3", 2), ("mtp", 1), ("dflash", 1)])
def test_no_gate_can_be_seen(models, kind, seed):
    """Steps that are not read leave holes."""
    spec = {"mtp": "mtp", "dflash": "block"}.get(kind, "eagle")
    engine = make_engine(models, spec, kind, LEARNED, dtype="float32", max_running=5)
    wanted = numbers(models.reference("shallow", "float32", "sampled"))
    worker = engine.worker
    worker.budget._gate = FlickeringGate(seed, within=seed == 2)
    assert numbers(engine.generate(prompts(), PARAMS["sampled"])) == wanted
    assert worker.counters()["draft/trees"] > 0
    worker.budget._gate = ShutGate()
    assert worker.max_draft_tokens == 0
    extended = worker.counters()["draft/extended"]
    rollouts = engine.generate(prompts(), PARAMS["sampled"])
    assert numbers(rollouts) == wanted
    # Of the prompts, cached but for their last tokens, and of nothing that was decoded.
    assert 0 < worker.counters()["draft/extended"] - extended <= len(rollouts)


@pytest.mark.parametrize("spec", ["eagle", "mtp"])
def test_logits_that_are_no_distribution_end_a_request_alone(models, spec):
    """Such a row samples no token, so the draft gets none to read after the root."""
    engine = make_engine(models, spec, "eagle3" if spec == "eagle" else "mtp", FIXED)
    head = engine.worker.target.model.weight_loaders()["lm_head.weight"]
    values = head.read()
    engine.submit(prompts()[0], PARAMS["greedy"])
    for _ in range(3):
        engine.step()
    head.write(values * float("nan"))
    (ended,) = engine.generate([prompts()[2]], PARAMS["greedy"])
    assert ended.finish_reason == "error"
    head.write(values)
    assert engine.generate([prompts()[2]], PARAMS["greedy"])[0].finish_reason != "error"
    engine.check_integrity()


@pytest.mark.parametrize("spec", ["mtp", "hybrid"])
def test_levels_that_bring_less_than_they_take_are_left_out(models, spec, monkeypatch):
    kind = "mtp" if spec == "mtp" else "eagle"
    levels = {}
    for token_ms in (1e6, 0.0):
        worth = lambda self, batch, ms=token_ms: np.full(len(batch.entries), ms)  # noqa: E731
        monkeypatch.setattr(FixedBudget, "token_ms", worth)
        engine = make_engine(models, spec, kind, FIXED, dtype="float32", max_running=3)
        wanted = numbers(models.reference("shallow", "float32", "greedy"))
        assert numbers(engine.generate(prompts(), PARAMS["greedy"])) == wanted
        engine.check_integrity()
        counters = engine.worker.counters()
        assert counters["draft/trees"] > 10
        levels[token_ms] = counters["draft/levels"] / counters["draft/trees"]
    assert levels[1e6] > 1.2 * levels[0.0]
