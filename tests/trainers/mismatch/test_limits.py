"""What a comparison leaves as it was, and pairs that cannot be compared as a whole."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from rollout import RolloutEngine, SamplingParams
from rollout.errors import EngineStateError
from rollout.trainers.mismatch import Cause, compare
from tests.helpers.planted_faults import planted
from tests.helpers.tiny_families import save_tiny_family
from tests.trainers.mismatch.conftest import Pair


def transformers_state() -> tuple[object, ...]:
    return dict(ALL_ATTENTION_FUNCTIONS), modeling_qwen3.apply_rotary_pos_emb


@pytest.mark.parametrize("place", ["model.layers.1.self_attn.o_proj", "lm_head"])
def test_a_failed_forward_leaves_model_and_engine_as_they_were(windowed: Pair, place: str) -> None:
    model, before = windowed.model(), transformers_state()

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    handle = model.get_submodule(place).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        compare(model, windowed.engine, windowed.sampled)
    handle.remove()
    assert transformers_state() == before
    for module in model.modules():
        assert not module._forward_hooks
        assert "forward" not in vars(module)
        assert getattr(module, "config", model.config) is model.config
    assert compare(model, windowed.engine, windowed.sampled).suspects == []


def test_other_threads_are_not_watched(windowed: Pair) -> None:
    before, other = transformers_state(), windowed.model().train()
    engine = RolloutEngine.from_pretrained(windowed.folder, spec="none", dtype="float32")
    pairs = [(windowed.model(), windowed.engine), (windowed.model(), engine)]

    def compared(pair: tuple[Any, RolloutEngine]) -> list[tuple[int, int]]:
        model, engine = pair
        found = [compare(model, engine, windowed.sampled) for _ in range(3)]
        return [(len(each.suspects), len(each.ops)) for each in found]

    def trained() -> None:
        for _ in range(30):
            other(torch.randint(3, 90, (2, 9))).logits.sum().backward()

    with ThreadPoolExecutor() as pool:
        training = pool.submit(trained)
        found = list(pool.map(compared, pairs))
        training.result()
    assert found == [[(0, 40)] * 3] * 2
    assert transformers_state() == before
    engine.close()


def test_dropout_draws_from_a_state_that_is_put_back(windowed: Pair) -> None:
    state = torch.random.get_rng_state()
    with planted("dropout", windowed.model()) as model:
        compare(model, windowed.engine, windowed.sampled)
        assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_engine_that_sleeps_is_refused_before_its_weights_are_read(windowed: Pair) -> None:
    model, rollouts = windowed.model(), windowed.sampled
    windowed.engine.release_memory()
    with pytest.raises(EngineStateError, match="memory is released"):
        compare(model, windowed.engine, rollouts)
    windowed.engine.resume_memory()


def test_chunks_of_a_prompt_versions_and_missing_logprobs(windowed: Pair) -> None:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    [first] = windowed.engine.generate([[3, 4] * 246], params)
    row = {"prompt_ids": [5], "token_ids": [5, 6], "logprobs": [None, None]}
    first.logprobs[:15], first.weight_versions[:15] = [-9.0] * 15, [-1] * 15
    found = compare(windowed.model(), windowed.engine, [first, row])
    assert {version: each.tokens for version, each in found.by_version.items()} == {-1: 15, 0: 7}
    assert sum(each.tokens for each in found.by_position.values()) == 22
    assert list(found.by_position) == sorted(found.by_position)
    assert (found.suspects, found.engine_difference) == ([], 0)


def test_a_padded_vocabulary_is_named_and_logprobs_compared(windowed: Pair) -> None:
    model = windowed.model()
    model.resize_token_embeddings(104, mean_resizing=False)
    found = compare(model, windowed.engine, windowed.sampled)
    assert {each.cause for each in found.suspects} == {Cause.MISSING_TENSOR}
    assert found.notes == ["ops are not compared: the engine has other tensors"]
    assert found.tokens == 120


def test_numbers_that_are_none_are_named_and_null_in_json(windowed: Pair) -> None:
    model = windowed.model()
    handle = model.lm_head.register_forward_hook(
        lambda module, args, output: output.index_fill(-1, torch.tensor([3]), -math.inf)
    )
    masked = compare(model, windowed.engine, windowed.sampled)
    assert masked.max_logit_difference == masked.divergence.max == math.inf
    handle.remove()
    model.lm_head.register_forward_hook(lambda module, args, output: output * math.nan)
    found = compare(model, windowed.engine, windowed.sampled)
    assert "a logprob is no number" in [each.sentence for each in found.suspects]
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["max_difference"] is None


def test_autocast_inside_the_model_is_its_dtype(pairs: dict[str, Pair]) -> None:
    pair = pairs["bfloat16"]
    model = pair.model().float()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    suspects = compare(model, pair.engine, pair.sampled).suspects
    assert [each.cause for each in suspects] == [Cause.ROUNDING]


def test_two_16_bit_dtypes_of_one_checkpoint_are_not_stale(windowed: Pair) -> None:
    engine = RolloutEngine.from_pretrained(windowed.folder, spec="none", dtype="float16")
    rollouts = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20))
    suspects = compare(windowed.model().bfloat16(), engine, rollouts).suspects
    assert [each.cause for each in suspects] == [Cause.DTYPE]
    engine.close()


def test_without_ops_rounding_is_not_claimed(tmp_path: Path) -> None:
    pair = Pair(save_tiny_family(tmp_path, "olmo2"), "bfloat16")
    found = compare(pair.model(), pair.engine, pair.sampled)
    assert "ops were not compared" in found.suspects[0].sentence
    assert found.notes[0].startswith("ops of Olmo2ForCausalLM are not compared: only those of")
    pair.engine.close()
