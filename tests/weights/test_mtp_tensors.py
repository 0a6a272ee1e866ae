"""Tensors of MTP heads that come with a target's weights and are not used."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError
from rollout.weights.manifest import TensorSpec
from tests.helpers.tiny_mtp import save_tiny_mtp

PROMPT = list(range(3, 20))
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0)


@pytest.fixture(params=["mimo", "qwen3_next", "deepseek_v3"])
def folders(request, tmp_path):
    """Two policies, each with a chain beside it."""
    return [save_tiny_mtp(tmp_path / str(seed), request.param, seed=seed)[0] for seed in range(2)]


def tokens(engine):
    return [rollout.token_ids for rollout in engine.generate([PROMPT], PARAMS)]


@pytest.mark.parametrize("how", ["disk", "collection", "mapping", "generator", "announced"])
def test_they_go_nowhere_whichever_way_they_come(folders, how):
    old, new = folders
    engine = RolloutEngine.from_pretrained(old, spec="none")
    wanted = tokens(RolloutEngine.from_pretrained(new, spec="none"))
    assert tokens(engine) != wanted
    named = load_file(new / "model.safetensors")
    if how == "disk":
        engine.update_weights_from_disk(new)
    elif how == "announced":
        engine.begin_weight_update({name: TensorSpec.of(it) for name, it in named.items()})
        engine.update_weights_from_tensor(named)
        engine.end_weight_update()
    else:
        ways = {
            "collection": list(named.items()),
            "mapping": named,
            "generator": iter(named.items()),
        }
        engine.update_weights_from_tensor(ways[how])
    assert tokens(engine) == wanted
    assert engine.weight_version == 1


def test_other_unknown_names_are_refused_beside_them(folders):
    engine = RolloutEngine.from_pretrained(folders[0], spec="none")
    named = load_file(folders[1] / "model.safetensors")
    named["model.layers.1.enorm.weight"] = torch.ones(4)
    with pytest.raises(InvalidInputError, match=r"unexpected: model.layers.1.enorm.weight"):
        engine.update_weights_from_tensor(named)


def test_a_chain_alone_is_no_update(folders):
    engine = RolloutEngine.from_pretrained(folders[0], spec="none")
    plain = engine.worker.target.model.weight_loaders()
    named = load_file(folders[1] / "model.safetensors")
    only_chain = {name: it for name, it in named.items() if name not in plain}
    with pytest.raises(InvalidInputError, match="must bring a tensor"):
        engine.update_weights_from_tensor(iter(only_chain.items()), partial=True)
    assert engine.worker.weights.serves
