"""An engine without a weight file: nothing is generated before a trainer sent all of them."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.config import LoadFormat, ModelConfig
from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.offline.config import DataConfig, RunConfig
from tests.helpers.tiny_model import save_tiny_llama

PROMPTS = [[5, 9, 11, 3], [1, 2]]
PARAMS = SamplingParams(max_new_tokens=12, seed=3)


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_a_full_update_is_what_makes_it_serve(tmp_path, spec):
    whole = save_tiny_llama(tmp_path / "whole")
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    options = {"kv_bytes": 1 << 20, "dtype": "float32"}
    engine = RolloutEngine.from_pretrained(bare, spec, load_format="dummy", **options)
    tensors = list(load_file(whole / "model.safetensors").items())

    with pytest.raises(WeightUpdateError, match="load_format=dummy"):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(WeightUpdateError, match="cannot heal"):
        engine.update_weights_from_tensor(tensors[:1], partial=True)
    engine.update_weights_from_tensor(tensors)

    expected = RolloutEngine.from_pretrained(whole, "none", **options).generate(PROMPTS, PARAMS)
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in rollouts] == [r.token_ids for r in expected]
    assert [r.logprobs for r in rollouts] == [r.logprobs for r in expected]


def test_a_dataset_job_is_refused():
    model = ModelConfig(path="model", load_format=LoadFormat.dummy)
    with pytest.raises(InvalidInputError, match=r"model\.load_format"):
        RunConfig(model=model, data=DataConfig(path="prompts.jsonl"))


def test_an_unknown_format_is_refused():
    with pytest.raises(InvalidInputError, match="safetensors, dummy"):
        ModelConfig(path="model", load_format="gguf")
