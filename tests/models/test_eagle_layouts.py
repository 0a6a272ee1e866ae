"""The folders that are recognised as EAGLE drafts, and the errors for others."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import DType
from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.draft_model import DraftFamily
from rollout.models.eagle.eagle3 import target_token_ids
from rollout.models.eagle.loader import load_eagle, read_eagle_spec
from rollout.models.loader import load_model
from rollout.models.spec import ModelSpec
from tests.helpers.tiny_draft import save_tiny_eagle1, save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=8)


@pytest.fixture(scope="module")
def target(target_path):
    return load_model(target_path, DType.float32, CPU)


@pytest.fixture
def eagle3(target_path, tmp_path):
    return save_tiny_eagle3(tmp_path / "eagle3", target_path, draft_vocab_size=31)


@pytest.fixture
def eagle1(target_path, tmp_path):
    return save_tiny_eagle1(tmp_path / "eagle1", target_path)


def edit_config(folder, remove=(), **fields):
    config = json.loads((folder / "config.json").read_text()) | fields
    for name in remove:
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def fails(folder, target, *parts, error=CheckpointError):
    with pytest.raises(error) as raised:
        load_eagle(folder, target)
    for part in (str(folder), *parts):
        assert part in str(raised.value)


def test_the_spec_says_what_sizes_and_features_need(target_path, eagle3, eagle1):
    target = ModelSpec.read(target_path)
    spec = read_eagle_spec(eagle3, target)
    decoder = spec.decoder
    assert (spec.family, decoder.num_layers, spec.num_steps) == (DraftFamily.EAGLE3, 1, 1)
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (6, 2, 8)
    assert (spec.hidden_size, spec.feature_size, spec.draft_vocab_size) == (48, 3 * 48, 31)
    assert decoder.max_context_len == 512  # the target's, the draft's own being 64
    spec = read_eagle_spec(eagle1, target)
    assert (spec.family, spec.feature_size) == (DraftFamily.EAGLE, 48)
    assert spec.draft_vocab_size == target.vocab_size


def test_layers_are_those_entered(target_path, tiny_model_path, tmp_path):
    target = ModelSpec.read(target_path)
    folder = save_tiny_eagle3(tmp_path / "draft", target_path, layout="eagle")
    assert read_eagle_spec(folder, target).features.layers == (2, 4, 5)
    edit_config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]})
    assert read_eagle_spec(folder, target).features.layers == (1, 4, 7)
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[0, 3, 6])
    assert read_eagle_spec(folder, target).features.layers == (0, 3, 6)
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[0, 3, 9])
    with pytest.raises(CheckpointError, match=r"\[0, 3, 9\].*8"):
        read_eagle_spec(folder, target)
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[3, 0, 6])
    with pytest.raises(UnsupportedModelError, match="eagle_aux_hidden_state_layer_ids"):
        read_eagle_spec(folder, target)
    folder = save_tiny_eagle3(tmp_path / "shallow", tiny_model_path, layout="eagle")
    with pytest.raises(CheckpointError, match="eagle_aux_hidden_state_layer_ids"):
        read_eagle_spec(folder, ModelSpec.read(tiny_model_path))


def test_names_may_stand_behind_model_and_layers_for_midlayer(eagle3, target):
    def rename(tensors):
        for name in list(tensors):
            if name not in ("lm_head.weight", "d2t", "t2d"):
                tensors[f"model.{name.replace('midlayer', 'layers.0')}"] = tensors.pop(name)

    before = load_eagle(eagle3, target).weight_loaders()
    after = load_eagle(edit_tensors(eagle3, rename), target).weight_loaders()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].read(), before[name].read()) for name in before)


def test_unknown_layouts_are_named(eagle3, target, tmp_path):
    fails(tmp_path / "nowhere", target, "no such folder")
    edit_tensors(eagle3, lambda tensors: tensors.pop("midlayer.hidden_norm.weight"))
    fails(
        eagle3, target, "midlayer.mlp.down_proj.weight", "EAGLE's own", "SpecForge", "speculators"
    )
    edit_config(eagle3, speculators_model_type="mlp")
    fails(eagle3, target, "speculators_model_type='mlp'", error=UnsupportedModelError)
    (eagle3 / "model.safetensors").rename(eagle3 / "pytorch_model.bin")
    fails(eagle3, target, "pytorch_model.bin", "safetensors only")


def test_options_that_are_not_implemented_are_refused_by_name(
    target_path, eagle3, target, tmp_path
):
    plain = json.loads((eagle3 / "config.json").read_text())
    for options, name in (
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"parallel_drafting": True}, "parallel_drafting"),
    ):
        (eagle3 / "config.json").write_text(json.dumps(plain | options))
        fails(eagle3, target, name, error=UnsupportedModelError)
    folder = save_tiny_eagle1(
        tmp_path / "draft", target_path, layout="speculators", options={"layernorms": True}
    )
    fails(folder, target, "layernorms=True", error=UnsupportedModelError)
    folder = save_tiny_eagle3(tmp_path / "other", target_path, layout="speculators")
    fails(edit_config(folder, remove=["norm_before_residual"]), target, "norm_before_residual")


def test_tensors_that_do_not_fit_are_named(eagle1, eagle3, target):
    whole = load_file(eagle3 / "model.safetensors")
    for missing in ("lm_head.weight", "d2t"):  # of a reduced vocabulary
        save_file(
            {name: it for name, it in whole.items() if name != missing},
            eagle3 / "model.safetensors",
        )
        fails(eagle3, target, missing)
    save_file(whole, eagle3 / "model.safetensors")
    edit_tensors(eagle1, lambda it: it.update({"lm_head.weight": torch.ones(97, 48)}))
    fails(eagle1, target, "unexpected: draft.lm_head.weight")
    edit_tensors(eagle3, lambda it: it.update({"fc.weight": torch.ones(48, 96)}))
    fails(eagle3, target, "draft.fc.weight is [48, 96], the model has [48, 144]")
    fails(edit_config(eagle3, target_hidden_size=64), target, "target_hidden_size=64")
    fails(edit_config(eagle1, hidden_size=40), target, "hidden size is 40", "48")


def test_a_head_that_is_not_brought_is_the_targets(target_path, target, tmp_path):
    folder = save_tiny_eagle3(tmp_path / "draft", target_path)
    edit_tensors(folder, lambda it: it.pop("lm_head.weight"))
    draft = load_eagle(folder, target)
    assert "draft.lm_head.weight" not in draft.weight_loaders()
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * draft.final_norm_E
    torch.testing.assert_close(draft.logits(hidden), target.logits(normed), rtol=1e-5, atol=1e-5)


def test_tables_of_the_vocabulary():
    tokens = torch.tensor([4, 0, 7])
    marked = torch.zeros(9, dtype=torch.bool)
    marked[tokens] = True
    differences = tokens - torch.arange(3)
    for t2d in (marked, None):
        assert target_token_ids(differences, t2d, 3, 9).tolist() == [4, 0, 7]
    assert target_token_ids(tokens, marked, 3, 9).tolist() == [4, 0, 7]
    assert target_token_ids(torch.zeros(9).long(), marked, 9, 9).tolist() == list(range(9))
    for d2t, t2d, size in (
        (differences[:2], None, 3),
        (torch.tensor([0, -1, 0]), None, 3),  # token 0 twice
        (torch.tensor([0, 0, 7]), None, 3),  # token 9 of 9
        (differences + 1, marked, 3),
    ):
        with pytest.raises(CheckpointError, match="d2t"):
            target_token_ids(d2t, t2d, size, 9)
