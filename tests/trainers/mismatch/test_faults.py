"""A planted fault is the first suspect; a clean pair has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout import RolloutEngine
from rollout.trainers import RolloutHook
from rollout.trainers.exact import exact_forward
from rollout.trainers.mismatch import Cause, compare
from tests.helpers.planted_faults import FAULTS, planted
from tests.helpers.tiny_families import save_tiny_family
from tests.trainers.mismatch.conftest import Pair

OPTIONS = {"positions": {"left_padding": 5}}


def test_every_cause_has_a_fault() -> None:
    assert set(FAULTS) == set(Cause)


@pytest.mark.parametrize("cause", FAULTS)
def test_the_first_suspect_is_the_fault(pairs: dict[str, Pair], cause: str) -> None:
    pair = pairs["bfloat16" if cause == "rounding" else "float32"]
    if cause == "router" and pair.engine.worker.weights.parts["target"].spec.experts is None:
        pytest.skip("a dense model has no router")
    rollouts = pair.rollouts(temperature=0.7) if cause == "sampling" else pair.sampled
    with planted(cause, pair.model()) as model:
        found = compare(model, pair.engine, rollouts, **OPTIONS.get(cause, {}))
    assert [str(each.cause) for each in found.suspects][:1] == [cause], found.suspects


def test_the_router_in_another_dtype_is_named(moe: Pair) -> None:
    model = moe.model()
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
            layer.mlp.gate.to(torch.bfloat16)
    first, *_ = compare(model, moe.engine, moe.sampled).suspects
    assert (first.cause, first.where) == (Cause.ROUTER, "model.layers.0.mlp.gate.weight")


def test_sentences_name_the_change_that_explains_an_op(windowed: Pair) -> None:
    model = windowed.model()
    with planted("mask", model):
        [suspect] = compare(model, windowed.engine, windowed.sampled).suspects
    assert suspect.where == "layers.0.self_attn.attention"
    assert "a window of 6" in suspect.sentence  # the engine's is 5
    norm = windowed.model()
    inner = norm.model.layers[2].post_attention_layernorm
    inner.register_forward_hook(
        lambda module, args, output: output / module.weight * (1 + module.weight)
    )
    [suspect] = compare(norm, windowed.engine, windowed.sampled).suspects
    assert (suspect.cause, suspect.where) == (Cause.NORM, "layers.2.post_attention_layernorm")
    assert "1 + its weight" in suspect.sentence


def test_an_adapter_scaled_otherwise_is_told_from_one_not_merged(windowed: Pair) -> None:
    model = windowed.model()
    adapted = FAULTS["adapter"](model)
    assert (
        "is not merged" in compare(adapted, windowed.engine, windowed.sampled).suspects[0].sentence
    )
    engine = RolloutEngine.from_pretrained(windowed.folder, spec="none", dtype="float32")
    RolloutHook(engine, adapted).sync()
    assert compare(adapted, engine, windowed.sampled).suspects == []
    for module in adapted.modules():
        if isinstance(getattr(module, "scaling", None), dict):  # attention has one too, a number
            module.scaling["default"] *= 2
    suspects = compare(adapted, engine, windowed.sampled).suspects
    assert {each.cause for each in suspects} == {Cause.ADAPTER}
    assert "has 0.5 of the trainer's scale" in suspects[0].sentence
    engine.close()


def test_top_p_left_out_is_named(windowed: Pair) -> None:
    rollouts = windowed.rollouts(top_p=0.7, sampling_logprobs=True)
    for rollout in rollouts:  # as an engine has them that renormalises
        rollout.logprobs = rollout.extras.sampling_logprobs
    found = compare(windowed.model(), windowed.engine, rollouts)
    assert [(each.cause, each.where) for each in found.suspects] == [(Cause.SAMPLING, "top_p")]


@pytest.mark.parametrize("seed", range(4))
def test_a_clean_float32_pair_has_no_suspect(pairs: dict[str, Pair], seed: int) -> None:
    pair = pairs["float32"]
    found = compare(pair.model(), pair.engine, pair.rollouts(seed=seed))
    assert found.suspects == []
    assert 0 < found.max_difference < 1e-4
    assert found.engine_difference == 0
    assert all(op.is_explained for op in found.ops)


def test_bfloat16_rounds_with_a_share_for_each_op(pairs: dict[str, Pair]) -> None:
    pair = pairs["bfloat16"]
    found = compare(pair.model(), pair.engine, pair.sampled)
    assert [each.cause for each in found.suspects] == [Cause.ROUNDING]
    assert sum(op.share for op in found.ops) == pytest.approx(1)
    largest = max(found.ops, key=lambda op: op.share)
    assert f"{largest.name} " in found.suspects[0].sentence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("left_padding", [0, 3])
def test_exact_training_has_no_difference_at_all(
    pairs: dict[str, Pair], dtype: str, left_padding: int
) -> None:
    pair, model = pairs[dtype], pairs[dtype].model()
    with exact_forward(model):
        found = compare(model, pair.engine, pair.sampled, left_padding=left_padding)
    assert (found.max_difference, found.max_logit_difference) == (0, 0)
    assert (found.divergence.max, found.flips, found.engine_difference) == (0, 0, 0)
    assert (found.ratio.min, found.ratio.max, found.ratio.outside) == (1, 1, 0)
    assert {op.difference for op in found.ops} == {0}
    assert [str(each.cause) for each in found.suspects] in ([], ["positions"])


def test_an_attention_that_rounds_more_is_named(pairs: dict[str, Pair]) -> None:
    pair = pairs["bfloat16"]
    model = pair.model()
    model.set_attn_implementation("eager")
    suspects = compare(model, pair.engine, pair.sampled).suspects
    expected = [Cause.ATTENTION_IMPLEMENTATION, Cause.ROUNDING]
    assert [each.cause for each in suspects] == expected
    assert "eager is" in suspects[0].sentence


def test_a_norm_in_another_dtype_is_told_from_another_norm(windowed: Pair) -> None:
    model = windowed.model()
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    [suspect] = compare(model, windowed.engine, windowed.sampled).suspects
    assert (suspect.cause, suspect.where) == (Cause.DTYPE, "layers.1.input_layernorm")
    assert "the digits of bfloat16" in suspect.sentence


def test_a_head_in_float32_is_named(pairs: dict[str, Pair]) -> None:
    pair = pairs["bfloat16"]
    model = pair.model()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model.lm_head.float()
    first, *_ = compare(model, pair.engine, pair.sampled).suspects
    assert (first.cause, first.where) == (Cause.LOGITS, "lm_head.weight")


def test_an_epsilon_too_small_to_show_is_named(pairs: dict[str, Pair]) -> None:
    pair = pairs["bfloat16"]
    model = pair.model()
    FAULTS["norm"](model)
    suspects = compare(model, pair.engine, pair.sampled).suspects
    assert {each.cause for each in suspects} == {Cause.NORM}
    assert "has the epsilon 0.0001, the engine" in suspects[0].sentence


def test_a_head_that_the_engine_ties_is_named(tmp_path: Path) -> None:
    pair = Pair(save_tiny_family(tmp_path, "qwen3"), "float32")
    with planted("missing_tensor", pair.model()) as model:
        [suspect] = compare(model, pair.engine, pair.sampled).suspects
    assert (suspect.cause, suspect.where) == (Cause.MISSING_TENSOR, "lm_head.weight")
    assert "is tied to model.embed_tokens.weight in the engine" in suspect.sentence
    pair.engine.close()


def test_a_changed_residual_is_named(windowed: Pair) -> None:
    model = windowed.model()
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.01)
    [suspect] = compare(model, windowed.engine, windowed.sampled).suspects
    assert (suspect.cause, suspect.where) == (Cause.DTYPE, "layers.1.residual")
