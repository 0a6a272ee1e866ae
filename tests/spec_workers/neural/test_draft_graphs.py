"""Captured drafts on a CPU propose what drafts that are run anew propose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.ops.extension import cpu
from tests.helpers.parity_models import FIXED, PARAMS, ParityModels, prompts
from tests.helpers.tiny_draft import save_tiny_eagle3

SMALL = {"dtype": "float32", "num_threads": 1, "max_running": 6}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> ParityModels:
    if cpu is None:
        pytest.skip("rollout.ops._cpu is not built")
    return ParityModels(tmp_path_factory.mktemp("models"))


def opened(models: ParityModels, kind: str, **options) -> RolloutEngine:
    spec = {"dflash": "block", "mtp": "mtp"}.get(kind, "eagle")
    draft = models.draft("llama", kind)
    own = {} if draft is None else {"draft_path": str(draft)}
    options = SMALL | options
    return RolloutEngine.from_pretrained(
        models.target("llama"), spec, spec_options=FIXED | own, **options
    )


def counts(engine: RolloutEngine) -> list[object]:
    """Tokens of rollouts alone and together, and how many were proposed and accepted."""
    params, metrics = PARAMS["sampled"], engine.metrics()
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts()]
    together = [each.token_ids for each in engine.generate(prompts(), params)]
    after = engine.metrics()
    found = (after.proposed - metrics.proposed, after.accepted - metrics.accepted)
    return [alone, together, found]


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "mtp"])
def test_captured_drafts_are_those_run_anew(models, kind) -> None:
    captured, anew = opened(models, kind), opened(models, kind, graph_bytes=0)
    drafter = captured.worker.drafter
    forwards = drafter.runners[0]._graphs
    sent = [(name, value * 1.01) for name, value in weights_of(anew)]
    for change in ("nothing", "weights", "sleep"):
        for engine in (captured, anew):
            if change == "weights":
                engine.update_weights_from_tensor(sent)
            elif change == "sleep":
                engine.release_memory()
                engine.resume_memory()
        assert counts(captured) == counts(anew), change
        assert forwards.num_graphs, change
        assert not forwards.failure
        proposals = drafter._proposer._graphs
        assert (proposals is not None and proposals.num_graphs > 0) == (kind == "dflash")
    captured.close()
    anew.close()


def weights_of(engine: RolloutEngine) -> list[tuple[str, torch.Tensor]]:
    tensors = load_file(Path(engine.config.model.path) / "model.safetensors")
    return list(tensors.items())


def test_wide_proposals_are_not_captured(models) -> None:
    """Python takes a small part of them, and their graphs would take the room of others."""
    engine = opened(models, "dflash")
    proposer = engine.worker.drafter._proposer
    proposer._max_trees = 2
    engine.generate(prompts(), PARAMS["sampled"])
    assert {shape.trees for shape in proposer._graphs._graphs} <= {1, 2}
    engine.close()


def test_a_draft_with_experts_is_not_captured(models) -> None:
    """Experts make other calls for other rows."""
    engine = RolloutEngine.from_pretrained(
        models.target("latent"), "mtp", spec_options=FIXED, **SMALL
    )
    assert engine.worker.drafter.runners[0]._graphs is None
    engine.close()


def test_forwards_leave_drafts_their_room(models) -> None:
    engine = opened(models, "dflash", graph_bytes=8 << 20)
    drafter = engine.worker.drafter
    bounds = [
        runner._max_bytes()
        for runner in (
            engine.worker.target.graphs.graph_runner,
            drafter.runners[0]._graphs,
            drafter._proposer._graphs,
        )
    ]
    assert bounds == [7 << 20, 1 << 20, 1 << 20]
    engine.generate(prompts(), PARAMS["sampled"])
    assert drafter._proposer._graphs._max_bytes() < 1 << 20, "they share it"
    engine.close()


def test_no_more_children_than_the_draft_has_tokens(models, tmp_path) -> None:
    folder = save_tiny_eagle3(
        tmp_path, models.target("llama"), layers=(0, 1, 2), draft_vocab_size=3
    )
    options = {"draft_path": str(folder)} | FIXED
    with pytest.raises(InvalidInputError, match=r"spec.topk=4: the draft has 3 tokens"):
        RolloutEngine.from_pretrained(
            models.target("llama"), "eagle", spec_options=options | {"topk": 4}, **SMALL
        )
    engine = RolloutEngine.from_pretrained(
        models.target("llama"), "eagle", spec_options=options | {"topk": 3}, **SMALL
    )
    assert engine.generate(prompts()[:1], PARAMS["greedy"])[0].token_ids
    engine.close()
