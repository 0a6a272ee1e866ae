"""EAGLE and DFlash drafts against an independent implementation: a teacher-forced pass, then two
steps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rollout.config import DType
from rollout.models.eagle.loader import load_eagle, read_eagle_spec
from rollout.models.loader import load_model
from tests.helpers.dense_attention import BlockAttention, GrowingAttention, features_of
from tests.helpers.plain_eagle import PlainDFlash, PlainEagle1, PlainEagle3
from tests.helpers.tiny_draft import save_tiny_dflash, save_tiny_eagle1, save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama

CPU = torch.device("cpu")
TOKENS = torch.tensor([5, 9, 11, 3, 70, 2, 96, 0, 33])  # the last follows the sequence


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=8, intermediate_size=40)


@pytest.fixture(scope="module")
def target(target_path):
    return load_model(target_path, DType.float32, CPU)


def files_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


@torch.inference_mode()
def steps(model, features, attention=None):
    """Logits of the pass over given tokens, then of two steps on its last hidden state.

    Without ``attention`` the model attends over whole sequences, so each step runs it all anew.
    """
    tokens, hidden = TOKENS[1:], model.fuse(features)
    positions = torch.arange(len(tokens))
    caches = () if attention is None else (attention,)
    out = model.forward(tokens, hidden, positions, *caches)
    logits = [model.logits(out)]
    for step, token in enumerate((17, 51)):
        new = torch.tensor([token]), out[-1:], torch.tensor([len(TOKENS) - 1 + step])
        if attention is None:
            old = tokens, hidden, positions
            new = tokens, hidden, positions = tuple(map(torch.cat, zip(old, new, strict=True)))
        out = model.forward(*new, *caches)[-1:]
        logits.append(model.logits(out))
    return torch.cat(logits)


def embedding_and_head(target_path):
    tensors = load_file(target_path / "model.safetensors")
    return tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]


CASES = {
    "the authors'": {"layout": "eagle", "layers": (2, 4, 5)},
    "SpecForge's, unsorted vocabulary": {"draft_vocab_size": 31, "unsorted": True},
    "SpecForge's, tokens in d2t": {"draft_vocab_size": 31, "absolute": True},
    "speculators'": {"layout": "speculators", "draft_vocab_size": 40, "layers": (0, 3, 8)},
    "speculators' norm_before_residual and norm_before_fc": {
        "layout": "speculators",
        "options": {"norm_before_residual": True, "norm_before_fc": True},
    },
    "biases, one kv head, odd sizes": {
        "bias": True, "num_heads": 5, "num_kv_heads": 1, "head_dim": 6, "intermediate_size": 33,
    },
    "normed queries and keys": {"layout": "speculators", "options": {"qk_norm": True}},
    "EAGLE-3.1": {"options": {"fc_norm": True, "norm_output": True}},
    "two layers read, another width": {"hidden_size": 30, "layers": (1, 7)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_eagle3_is_the_papers(case, target_path, target, tmp_path):
    folder = save_tiny_eagle3(tmp_path / "draft", target_path, **CASES[case])
    tensors, config = files_of(folder)
    draft = load_eagle(folder, target)
    assert draft.spec == read_eagle_spec(folder, target.spec)
    assert draft.spec.features.layers == CASES[case].get("layers", (0, 1, 2))
    features = features_of(target, draft.spec.features, TOKENS[:-1])

    layer = config.get("transformer_layer_config", config)
    plain = PlainEagle3(tensors, layer, embedding_and_head(target_path)[0], config)
    expected = steps(plain, features.split(48, dim=1))
    if draft.token_ids_D is not None:
        stored = tensors["d2t"]
        if not CASES[case].get("absolute"):
            stored = stored + torch.arange(len(stored))
        assert draft.token_ids_D.tolist() == sorted(stored.tolist())
        expected = expected[:, stored.argsort()]
    assert draft.token_ids_D is None or len(draft.token_ids_D) == draft.spec.draft_vocab_size
    found = steps(draft, features, GrowingAttention())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, loader in draft.weight_loaders().items():  # in the checkpoint's order
        stored = name.removeprefix("draft.").replace("midlayer.", layer_prefix(tensors))
        assert torch.equal(loader.read(), tensors[stored]), name


def layer_prefix(tensors) -> str:
    return "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"bias": False, "num_heads": 5, "num_kv_heads": 1, "head_dim": 6},
        {"layout": "speculators"},
        {"own_embedding": True},
    ],
)
def test_eagle_is_the_papers(case, target_path, target, tmp_path):
    folder = save_tiny_eagle1(tmp_path / "draft", target_path, **case)
    tensors, config = files_of(folder)
    draft = load_eagle(folder, target)
    assert draft.spec.features.final
    assert (draft.embedding_VE is None) == ("own_embedding" not in case)
    features = features_of(target, draft.spec.features, TOKENS[:-1])
    embedding, head = embedding_and_head(target_path)
    layer = config.get("transformer_layer_config", config)
    plain = PlainEagle1(tensors, layer, embedding, head)
    expected = steps(plain, [features])
    found = steps(draft, features, GrowingAttention())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"layers": (1, 4, 6), "num_layers": 3, "block_size": 7},
        {"num_heads": 5, "num_kv_heads": 1, "head_dim": 6, "intermediate_size": 33, "bias": True},
        {"layout": "speculators", "draft_vocab_size": 31, "layers": (0, 8)},
        {"options": {"block_size": None, "dflash_config": {
            "block_size": 9, "mask_token_id": 3, "target_layer_ids": [0, 1]}}},
    ],
)  # fmt: skip
@torch.inference_mode()
def test_dflash_is_the_papers(case, target_path, target, tmp_path):
    folder = save_tiny_dflash(tmp_path / "draft", target_path, **case)
    tensors, config = files_of(folder)
    draft = load_eagle(folder, target)
    spec = draft.spec
    assert spec == read_eagle_spec(folder, target.spec)
    assert spec.features.layers == case.get("layers", (1, 2))
    features = features_of(target, spec.features, TOKENS[:-1])
    plain = PlainDFlash(
        tensors, config.get("transformer_layer_config", config), *embedding_and_head(target_path)
    )
    block = torch.full((spec.block_size,), spec.mask_token_id)
    block[0] = TOKENS[-1]
    expected = plain.logits(list(features.split(48, dim=1)), block)
    if draft.token_ids_D is not None:
        stored = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        expected = expected[:, stored.argsort()]
    attention, begin = BlockAttention(), len(TOKENS) - 1
    for rows in torch.arange(begin).split(5):  # in chunks
        draft.forward(TOKENS[rows], draft.fuse(features[rows]), rows, attention)
    hidden = draft.draft(block, begin + torch.arange(len(block)), attention)
    torch.testing.assert_close(draft.logits(hidden), expected, rtol=1e-5, atol=1e-5)
    for name, loader in draft.weight_loaders().items():
        assert torch.equal(loader.read(), tensors[name.removeprefix("draft.")]), name


def test_what_a_draft_takes_from_the_target_follows_it(target_path, tmp_path):
    target = load_model(target_path, DType.float32, CPU)
    draft = load_eagle(save_tiny_eagle1(tmp_path / "draft", target_path), target)
    features = features_of(target, draft.spec.features, TOKENS[:-1])
    before = steps(draft, features, GrowingAttention())
    weight_loaders = target.weight_loaders()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight_loaders[name].write(-weight_loaders[name].read())
    tensors, config = files_of(tmp_path / "draft")
    embedding, head = embedding_and_head(target_path)
    plain = PlainEagle1(tensors, config, -embedding, -head)
    plain.embedding = -embedding
    after = steps(draft, features, GrowingAttention())
    assert not torch.allclose(after, before)
    expected = steps(plain, [features])
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
