"""The first proposals of a shape, which compile on a GPU, do not count as drafting times."""

from __future__ import annotations

import json
import math

from rollout import RolloutEngine, SamplingParams
from spec_workers.neural.drafter import NeuralDrafter
from tests.helpers.tiny_draft import save_copying_eagle1
from tests.helpers.tiny_model import save_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
WARMUP = 2


def test_proposals_that_compile_teach_no_cost(tmp_path, monkeypatch) -> None:
    target = save_tiny_llama(tmp_path / "target", num_layers=1)
    draft = save_copying_eagle1(tmp_path / "draft", target)
    options = {"calibration_seconds": 0, "num_draft_tokens": 4, "draft_path": str(draft)}
    engine = RolloutEngine.from_pretrained(target, "hybrid", spec_options=options)
    worker = engine.worker
    drafting, judged, proposals = [], [], []
    observe, propose = worker.budget.observe, worker.drafter.propose

    def observed(batch, selected, results, times) -> None:
        drafting.append(times.draft)
        observe(batch, selected, results, times)

    def proposed(*arguments, **options):
        proposals.append(propose(*arguments, **options))
        return proposals[-1]

    monkeypatch.setattr(worker.budget, "observe", observed)
    monkeypatch.setattr(worker.drafter, "propose", proposed)
    monkeypatch.setattr(
        NeuralDrafter,
        "is_warm",
        property(lambda self: not 3 <= len(proposals) < 3 + WARMUP, lambda self, value: None),
        raising=False,
    )
    monkeypatch.setattr(
        worker._gate, "judge", lambda *arguments, is_steady: judged.append(is_steady)
    )
    engine.generate([[5, 6, 7, 8]], PARAMS)
    assert len(proposals) > 4
    assert len(drafting) == engine.metrics().steps
    assert sum(map(math.isnan, drafting)) == WARMUP
    json.dumps(worker.budget.learned(), allow_nan=False)
    assert judged.count(False) == WARMUP
