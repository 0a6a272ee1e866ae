"""A planted fault is the first suspect; a clean pair has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine
from rollout.trainers import RolloutHook
from rollout.trainers.exact import exact_forward
from rollout.trainers.mismatch import Cause, Suspect, compare
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


def _router_in_bfloat16(model: Any) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
            layer.mlp.gate.bfloat16()


def _norm_plus_one(model: Any) -> None:
    model.model.layers[2].post_attention_layernorm.register_forward_hook(
        lambda module, args, output: output / module.weight * (1 + module.weight)
    )


def _norm_of_bfloat16(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))


def _larger_residual(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.01)


@pytest.mark.parametrize(
    ("change", "cause", "where", "sentence"),
    [
        (FAULTS["mask"], Cause.MASK, "layers.0.self_attn.attention", "a window of 6"),
        (_norm_plus_one, Cause.NORM, "layers.2.post_attention_layernorm", "1 + its weight"),
        (_norm_of_bfloat16, Cause.DTYPE, "layers.1.input_layernorm", "the digits of bfloat16"),
        (_larger_residual, Cause.DTYPE, "layers.1.residual", "differs by 0.01"),
        (_router_in_bfloat16, Cause.ROUTER, "model.layers.0.mlp.gate.weight", "is in bfloat16"),
    ],
)
def test_the_sentence_says_what_was_changed(
    windowed: Pair,
    moe: Pair,
    change: Callable[[Any], None],
    cause: Cause,
    where: str,
    sentence: str,
) -> None:
    pair = moe if cause is Cause.ROUTER else windowed
    model = pair.model()
    change(model)
    first, *others = compare(model, pair.engine, pair.sampled).suspects
    assert (first.cause, first.where, others if pair is windowed else []) == (cause, where, [])
    assert sentence in first.sentence


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
    assert (found.ratio.min, found.ratio.max, found.outside) == (1, 1, 0)
    assert {op.difference for op in found.ops} == {0}
    assert [str(each.cause) for each in found.suspects] in ([], ["positions"])


def test_what_bfloat16_hides_is_named(pairs: dict[str, Pair]) -> None:
    pair = pairs["bfloat16"]

    def suspects_of(model: Any) -> list[Suspect]:
        return compare(model, pair.engine, pair.sampled).suspects

    eager, wide, other = (pair.model() for _ in range(3))
    eager.set_attn_implementation("eager")
    first, second = suspects_of(eager)
    assert (first.cause, second.cause) == (Cause.ATTENTION_IMPLEMENTATION, Cause.ROUNDING)
    assert "eager is" in first.sentence
    wide.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    wide.lm_head.float()
    first, *_ = suspects_of(wide)
    assert (first.cause, first.where) == (Cause.LOGITS, "lm_head.weight")
    FAULTS["norm"](other)
    suspects = suspects_of(other)
    assert {each.cause for each in suspects} == {Cause.NORM}
    assert "has the epsilon 0.0001, the engine" in suspects[0].sentence


def test_a_head_that_the_engine_ties_is_named(tmp_path: Path) -> None:
    pair = Pair(save_tiny_family(tmp_path, "qwen3"), "float32")
    with planted("missing_tensor", pair.model()) as model:
        [suspect] = compare(model, pair.engine, pair.sampled).suspects
    assert (suspect.cause, suspect.where) == (Cause.MISSING_TENSOR, "lm_head.weight")
    assert "is tied to model.embed_tokens.weight in the engine" in suspect.sentence
    pair.engine.close()
