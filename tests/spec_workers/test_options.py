"""Options of workers that cannot be are refused before the model is loaded."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine
from rollout.errors import CheckpointError, InvalidInputError
from spec_workers.options import check_topk
from tests.helpers.tiny_draft import save_tiny_eagle1
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp

NAN = float("nan")
BUDGET = [
    ({"budget": "nonsense"}, "budget"),
    ({"min_probability": 1.5}, "min_probability"),
    ({"calibration_seconds": NAN}, "calibration_seconds"),
    ({"num_draft_tokens": 64}, "num_draft_tokens"),
]
TREES = [
    ({"num_steps": 0}, "num_steps"),
    ({"topk": 0}, "topk"),
    ({"topk": 16, "num_steps": 5}, "topk"),
    ({"nonsense": 1}, "nonsense"),
]
NGRAM = [
    ({"calibration_seconds": -1}, "calibration_seconds"),
    ({"min_probability": NAN}, "min_probability"),
    ({"num_draft_tokens": -1}, "num_draft_tokens"),
]
EAGLE = [({"draft_path": None}, "draft_path"), ({"topk": 2.0}, "topk")]
MTP = [({"topk": 32}, "topk")]  # of three steps
CASES = [
    *(("ngram", *case) for case in BUDGET + NGRAM),
    *(("eagle", *case) for case in BUDGET + TREES + EAGLE),
    *(("mtp", *case) for case in BUDGET + TREES + MTP),
]
MODULES = {"ngram": "ngram", "eagle": "neural.draft_factory", "mtp": "neural.draft_factory"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with MTP heads, and an EAGLE draft of it."""
    folder = tmp_path_factory.mktemp("options")
    target, _ = save_tiny_mtp(folder, "mimo", 3)
    return target, str(save_tiny_eagle1(folder / "eagle", target))


@pytest.mark.parametrize(("spec", "options", "field"), CASES, ids=str)
def test_options_that_cannot_be(folders, monkeypatch, spec, options, field):
    target, draft = folders
    monkeypatch.setattr(
        f"spec_workers.{MODULES[spec]}.TargetWorker",
        lambda *_, **__: pytest.fail("loads the model"),
    )
    options = ({"draft_path": draft} if spec == "eagle" else {}) | options
    with pytest.raises(InvalidInputError, match=rf"spec\.{field}"):
        RolloutEngine.from_pretrained(target, spec, spec_options=options)


def test_drafts_that_are_not_there(folders, tmp_path):
    for spec in ("eagle", "mtp", "hybrid"):
        with pytest.raises(InvalidInputError, match=r"spec.draft_path='nowhere': there is no such"):
            RolloutEngine.from_pretrained(folders[0], spec, spec_options={"draft_path": "nowhere"})
    with pytest.raises(CheckpointError, match="no MTP chain"):
        RolloutEngine.from_pretrained(save_tiny_llama(tmp_path), "mtp")


@pytest.mark.parametrize(("topk", "num_steps"), [(63, 1), (63, 2), (31, 3), (1, 64), (21, 4)])
def test_as_many_nodes_are_expanded_as_a_mask_holds(topk, num_steps):
    check_topk(topk, num_steps)


@pytest.mark.parametrize(
    ("topk", "num_steps", "most"), [(64, 1, 63), (32, 3, 31), (22, 4, 21), (0, 4, 63), (1.5, 2, 63)]
)
def test_more_are_refused_with_the_most_there_can_be(topk, num_steps, most):
    with pytest.raises(InvalidInputError, match=rf"spec\.topk.*{most}"):
        check_topk(topk, num_steps)
