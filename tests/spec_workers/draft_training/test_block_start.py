"""Initial weights of a block draft: what the first mask's heads look at, and what they copy."""

from __future__ import annotations

import pytest
import torch

from rollout.config import DType
from rollout.errors import InvalidInputError
from rollout.models.loader import load_model
from spec_workers.draft_training.block_start import begin_with_copies
from spec_workers.draft_training.building import new_draft
from spec_workers.draft_training.draft import DraftVocabulary
from tests.helpers.tiny_model import save_tiny_llama

VOCAB, HIDDEN, CONTEXT = 400, 96, 30


def test_the_first_mask_begins_as_a_copy_of_the_last_rows(tmp_path):
    sizes = {"num_layers": 7, "hidden_size": HIDDEN, "num_heads": 3, "num_kv_heads": 1}
    folder = save_tiny_llama(tmp_path, vocab_size=VOCAB, **sizes)
    target = load_model(folder, DType.float32, torch.device("cpu"))
    embedding = target.weight_loaders()["model.embed_tokens.weight"]
    # As in trained models, all embeddings have a part in common, and all states another.
    embedding.write(embedding.read() * 10 + 1)
    draft = new_draft(target, DraftVocabulary(torch.arange(VOCAB), VOCAB), 0, "block")
    features_NF = torch.randn(3000, 3 * HIDDEN, generator=torch.manual_seed(0))
    features_NF[:, ::2] += 2
    features_NF[:, 1::2] -= 2
    with torch.no_grad():
        draft.hidden_norm.weight[3] = 0  # some models' norms leave a coordinate out
    begin_with_copies(draft, torch.arange(3000) % VOCAB, features_NF)

    layer, context = draft.layers[0], torch.arange(CONTEXT)
    fused_ME = draft.hidden_norm(draft.fc(features_NF[:CONTEXT]))
    block_BE = layer.input_layernorm(target.embed(torch.tensor([7, draft.mask_token_id])))
    positions_B = CONTEXT + torch.arange(2)
    keys, values = (
        torch.cat(parts)
        for parts in zip(
            layer.self_attn.keys_values(fused_ME, context),
            layer.self_attn.keys_values(block_BE, positions_B),
            strict=True,
        )
    )
    query_HC = layer.self_attn.queries(block_BE[1:], positions_B[1:])[0]
    scores_HM = torch.einsum("hc,mhc->hm", query_HC, keys) * query_HC.shape[1] ** -0.5
    weights_HM = scores_HM.softmax(1)
    assert (weights_HM[:2, CONTEXT - 1] > 0.8).all(), "two of three heads read the context's end"
    assert weights_HM[2, CONTEXT] > 0.8, "the third reads the token"

    copied_E = layer.self_attn.o_proj(torch.einsum("hm,mhc->hc", weights_HM, values).flatten())
    state_E = draft.fc(features_NF[CONTEXT - 1])
    assert torch.cosine_similarity(copied_E, state_E, dim=0) > 0.8


def test_the_mask_is_no_row_of_padding(tmp_path):
    folder = save_tiny_llama(tmp_path, vocab_size=VOCAB, num_layers=7, hidden_size=HIDDEN)
    target = load_model(folder, DType.float32, torch.device("cpu"))
    embedding = target.weight_loaders()["model.embed_tokens.weight"]
    table_VE = embedding.read().clone()
    table_VE[-3:] = 0
    embedding.write(table_VE)
    vocabulary = DraftVocabulary(torch.arange(VOCAB), VOCAB)
    assert new_draft(target, vocabulary, 0, "block").mask_token_id == VOCAB - 4
    embedding.write(torch.zeros_like(table_VE))
    with pytest.raises(InvalidInputError, match="a block needs a mask token"):
        new_draft(target, vocabulary, 0, "block")
