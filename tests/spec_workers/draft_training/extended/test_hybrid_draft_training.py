"""Drafts to train for targets with gated delta rule layers and experts are plain layers."""

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.config import DType
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.loader import load_model
from spec_workers.draft_training.building import load_draft, new_draft
from spec_workers.draft_training.draft import DraftVocabulary
from spec_workers.draft_training.sequences import TokenSequence
from spec_workers.draft_training.target_features import TargetFeatures
from spec_workers.draft_training.training_run import save_draft
from tests.helpers.dense_attention import features_of
from tests.helpers.tiny_hybrid import save_tiny_hybrid

LAYERS = [f"{'full' if k in (1, 5) else 'linear'}_attention" for k in range(7)]
SEQUENCES = [[5, 9, 11, 3, 70, 12, 9, 9, 41], [96, 2, 7], [8, 8, 8, 50, 61, 13]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return save_tiny_hybrid(folder, "qwen3_next", layer_types=LAYERS, experts=True)


@pytest.fixture(scope="module")
def target(folder):
    return load_model(folder, DType.float32, torch.device("cpu"))


@torch.inference_mode()
def test_features_are_those_of_the_sequences_alone(target):
    features = AuxHiddenStates(layers=(2, 3, 5), final=True)
    tokens = [TokenSequence(token_ids_L=torch.tensor(each), first_root=0) for each in SEQUENCES]
    for sequence, found in zip(
        SEQUENCES, TargetFeatures(target, features, tokens, 0).take([0, 1, 2]), strict=True
    ):
        alone = features_of(target, features, sequence[:-1])
        torch.testing.assert_close(found.features_NF, alone, rtol=1e-4, atol=1e-4)


def test_a_new_draft_is_one_that_engines_run(folder, target, tmp_path):
    vocabulary = DraftVocabulary(torch.arange(0, 90), 97)
    draft = new_draft(target, vocabulary, 0)
    layer = draft.midlayer
    at = "model.layers.5"  # the last that attends
    stored = {
        name: it.read() for name, it in target.weight_loaders().items() if name.startswith(at)
    }
    by_head = stored[f"{at}.self_attn.q_proj.weight"].view(4, 2, 16, 48)
    queries = layer.self_attn.q_proj.weight[:, -48:]
    assert torch.equal(queries, by_head[:, 0].reshape(64, 48))
    assert torch.equal(
        layer.post_attention_layernorm.weight, 1 + stored[f"{at}.post_attention_layernorm.weight"]
    )
    save_draft(draft, tmp_path, torch.float32)
    assert load_draft(tmp_path, target.embed).config() == draft.config() | {"dtype": "float32"}
    engine = RolloutEngine.from_pretrained(
        folder, "eagle", max_running=2,
        spec_options={"draft_path": str(tmp_path), "budget": "fixed"},
    )  # fmt: skip
    (rollout,) = engine.generate([SEQUENCES[0]], SamplingParams(max_new_tokens=12, seed=1))
    assert rollout.stats.drafted > 0
