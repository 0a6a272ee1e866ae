"""The hidden states a forward keeps for drafts."""

from __future__ import annotations

import torch

from rollout.config import DType
from rollout.models.aux_hidden_states import AuxHiddenStateCollector, AuxHiddenStates
from rollout.models.loader import load_model
from tests.helpers.dense_attention import DenseAttention


@torch.inference_mode()
def test_collected_states_are_the_residual_stream_and_change_nothing(tiny_model_path):
    model = load_model(tiny_model_path, DType.float32, torch.device("cpu"))
    tokens = torch.arange(11)
    attention = DenseAttention([11])
    plain = model.forward(tokens, attention.positions, attention)
    collector = AuxHiddenStateCollector(AuxHiddenStates(layers=(0, 2), final=True), 7, 48, plain)
    collecting = model.forward(tokens, attention.positions, attention, collector)
    assert torch.equal(collecting, plain)
    first, last, final = collector.features_TF.split(48, dim=1)
    assert torch.equal(first, model.vocabulary.embedding_WE[tokens[:7]])
    assert torch.equal(final, plain[:7])
    last = last.double()
    normed = last * (last.square().mean(-1, keepdim=True) + model.spec.rms_norm_eps).rsqrt()
    torch.testing.assert_close(normed.float() * model.final_norm_E, final, rtol=1e-5, atol=1e-5)


def test_one_readers_columns_among_those_of_all():
    eagle, mtp = AuxHiddenStates(layers=(1, 2, 5)), AuxHiddenStates(final=True)
    both = eagle | mtp
    assert both == AuxHiddenStates(layers=(1, 2, 5), final=True)
    features = torch.arange(2 * 12.0).view(2, 12)
    assert both.select(features, eagle).tolist() == features[:, :9].tolist()
    assert both.select(features, mtp).tolist() == features[:, 9:].tolist()
    assert both.select(features, both) is features
