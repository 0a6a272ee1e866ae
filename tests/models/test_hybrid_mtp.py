"""The MTP heads of Qwen3-Next and Qwen3.5 on their own targets."""

import pytest
import torch
from safetensors.torch import load_file

from rollout.config import DType
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.loader import load_model
from rollout.models.mtp.loader import MtpChain
from tests.helpers.dense_attention import DenseAttention, features_of
from tests.helpers.tiny_hybrid import save_tiny_chain, tiny_hybrid

TOKENS = torch.tensor([5, 9, 11, 3, 70, 12, 9, 9, 41, 80, 3])


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@torch.inference_mode()
def test_a_step_is_what_transformers_parts_compute(family, experts, tmp_path):
    theirs = save_tiny_chain(tmp_path, family, experts=experts)
    model = tiny_hybrid(family, experts=experts)
    target = load_model(tmp_path, DType.float32, torch.device("cpu"))
    (step,) = MtpChain.find(tmp_path, target.spec).load(target)
    assert step.spec.features == AuxHiddenStates(final=True)
    hidden = step.fuse(features_of(target, step.spec.features, TOKENS))[:-1]
    attention = DenseAttention([len(TOKENS) - 1])
    ours = step.forward(TOKENS[1:], hidden, attention.positions, attention)
    expected = theirs(model, TOKENS[1:], hidden)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    logits = model.lm_head(expected)
    torch.testing.assert_close(step.logits(ours), logits, rtol=1e-4, atol=1e-3)

    stored = load_file(tmp_path / "model.safetensors")
    weight_loaders = step.weight_loaders()
    required = {name for name, loader in weight_loaders.items() if loader.required}
    assert required == {name for name in stored if name.startswith("mtp.")}
    for name in required:
        assert torch.equal(weight_loaders[name].read(), stored[name]), name
    assert not weight_loaders.keys() & target.weight_loaders().keys()
