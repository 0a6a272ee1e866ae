"""What the first proposals of a shape take on a GPU, compiling, is not what drafting takes."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from spec_workers.neural.tree_drafter import TreeDrafter
from tests.helpers.tiny_draft import save_copying_eagle1
from tests.helpers.tiny_model import save_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
OPTIONS = {"calibration_seconds": 0, "num_draft_tokens": 4}


@pytest.mark.parametrize("spec", ["eagle", "hybrid"])
@pytest.mark.parametrize("unsettled", [0, 2])
def test_proposals_that_compile_teach_no_cost(tmp_path, monkeypatch, spec, unsettled) -> None:
    target = save_tiny_llama(tmp_path / "target", num_layers=1)
    draft = save_copying_eagle1(tmp_path / "draft", target)
    engine = RolloutEngine.from_pretrained(
        target, spec, spec_options=OPTIONS | {"draft_path": str(draft)}
    )
    worker = engine.worker
    told, proposals = [], []
    observe, propose = worker.budget.observe, worker.drafter.propose

    def observed(batch, *arguments) -> None:
        told.append(batch.step)
        observe(batch, *arguments)

    def proposed(*arguments):
        proposals.append(propose(*arguments))
        return proposals[-1]

    monkeypatch.setattr(worker.budget, "observe", observed)
    monkeypatch.setattr(worker.drafter, "propose", proposed)
    settled = property(lambda self: len(proposals) > unsettled)
    monkeypatch.setattr(TreeDrafter, "is_settled", settled)
    engine.generate([[5, 6, 7, 8]], PARAMS)
    assert len(proposals) > 2
    assert engine.metrics().steps - len(told) == unsettled
