"""The first proposals of a shape, which compile on a GPU, do not count as drafting times."""

from __future__ import annotations

import json
import math

import pytest

from rollout import RolloutEngine, SamplingParams
from spec_workers.neural.drafter import NeuralDrafter
from tests.helpers.tiny_draft import save_copying_eagle1
from tests.helpers.tiny_model import save_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
OPTIONS = {"calibration_seconds": 0, "num_draft_tokens": 4}


@pytest.mark.parametrize("spec", ["eagle", "hybrid"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_proposals_that_compile_teach_no_cost(tmp_path, monkeypatch, spec, warmup) -> None:
    target = save_tiny_llama(tmp_path / "target", num_layers=1)
    draft = save_copying_eagle1(tmp_path / "draft", target)
    engine = RolloutEngine.from_pretrained(
        target, spec, spec_options=OPTIONS | {"draft_path": str(draft)}
    )
    worker = engine.worker
    drafting, gated, proposals = [], [], []
    observe, propose = worker.budget.observe, worker.drafter.propose

    def observed(batch, selected, results, times) -> None:
        drafting.append(times.draft)
        observe(batch, selected, results, times)

    def proposed(*arguments, **options):
        proposals.append(propose(*arguments, **options))
        return proposals[-1]

    monkeypatch.setattr(worker.budget, "observe", observed)
    monkeypatch.setattr(worker.drafter, "propose", proposed)

    def is_warm(drafter) -> bool:
        return not 3 <= len(proposals) < 3 + warmup  # those that come first tell nothing yet

    monkeypatch.setattr(
        NeuralDrafter, "is_warm", property(is_warm, lambda self, value: None), raising=False
    )
    if spec == "hybrid":  # whose gate asks, besides, what the draft takes beside the corpus
        judge, learn = worker._gate.judge, worker._gate._drafting.observe

        def judged(*arguments, is_steady) -> None:
            gated.append([is_steady, 0])
            judge(*arguments, is_steady=is_steady)

        def learned(*arguments) -> None:
            gated[-1][1] += 1
            learn(*arguments)

        monkeypatch.setattr(worker._gate, "judge", judged)
        monkeypatch.setattr(worker._gate._drafting, "observe", learned)
    engine.generate([[5, 6, 7, 8]], PARAMS)
    assert len(proposals) > 4
    # All steps tell how drafts did, the first ones not what they cost.
    assert len(drafting) == engine.metrics().steps
    assert sum(map(math.isnan, drafting)) == warmup
    json.dumps(worker.budget.learned(), allow_nan=False)
    if spec == "hybrid":
        assert [is_steady for is_steady, _ in gated].count(False) == warmup
        assert all(is_steady for is_steady, count in gated if count)
        assert any(count for _, count in gated)
