"""Options of workers that cannot be are refused before the model is loaded."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine
from rollout.errors import CheckpointError, InvalidInputError
from spec_workers.features.feature_recorder import FeatureRingOptions
from spec_workers.options import check_topk
from tests.helpers.tiny_draft import save_tiny_eagle1
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp

NAN = float("nan")
EVERY = [
    ("budget", "nonsense"),
    ("min_probability", 1.5),
    ("calibration_seconds", NAN),
    ("num_draft_tokens", 64),
    ("nonsense", 1),
]
CASES = {
    "ngram": [*EVERY, ("calibration_seconds", -1), ("min_probability", NAN)],
    "eagle": [*EVERY, ("num_steps", 0), ("topk", 0), ("topk", 2.0), ("draft_path", None)],
    "mtp": [*EVERY, ("topk", 32)],  # of three steps
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with MTP heads, and an EAGLE draft of it."""
    folder = tmp_path_factory.mktemp("options")
    target = save_tiny_mtp(folder, "mimo", 3)
    return target, str(save_tiny_eagle1(folder / "eagle", target))


@pytest.mark.parametrize("spec", CASES)
def test_options_that_cannot_be_are_refused(folders, monkeypatch, spec):
    target, draft = folders
    for module in ("ngram", "neural.draft_factory"):
        monkeypatch.setattr(
            f"spec_workers.{module}.TargetWorker", lambda *_, **__: pytest.fail("loads the model")
        )
    for field, value in CASES[spec]:
        options = ({"draft_path": draft} if spec == "eagle" else {}) | {field: value}
        with pytest.raises(InvalidInputError, match=rf"spec\.{field}"):
            RolloutEngine.from_pretrained(target, spec, spec_options=options)


def test_drafts_that_are_not_there_are_refused(folders, tmp_path):
    for spec in ("eagle", "mtp", "hybrid"):
        with pytest.raises(InvalidInputError, match=r"spec.draft_path='nowhere': there is no such"):
            RolloutEngine.from_pretrained(folders[0], spec, spec_options={"draft_path": "nowhere"})
    with pytest.raises(CheckpointError, match="no MTP chain"):
        RolloutEngine.from_pretrained(save_tiny_llama(tmp_path), "mtp")


def test_as_many_nodes_are_expanded_as_a_mask_holds():
    for topk, num_steps in ((63, 1), (63, 2), (31, 3), (1, 64), (21, 4)):
        check_topk(topk, num_steps)
    for topk, num_steps, most in ((64, 1, 63), (32, 3, 31), (22, 4, 21), (0, 4, 63), (1.5, 2, 63)):
        with pytest.raises(InvalidInputError, match=rf"spec\.topk.*{most}"):
            check_topk(topk, num_steps)


def test_options_of_the_feature_ring_are_checked():
    for options, field in (
        ({"num_bytes": -1}, r"feature_ring\.num_bytes"),
        ({"dtype": "int8"}, r"feature_ring\.dtype"),
        ({"every": 0}, r"feature_ring\.every"),
        (5, r"feature_ring=5: must be a mapping of num_bytes"),
        ({"bytes": 1}, r"known options: num_bytes, dtype, every"),
    ):
        with pytest.raises(InvalidInputError, match=field):
            FeatureRingOptions.of(options)
