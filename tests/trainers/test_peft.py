"""LoRA merged into the stream: bitwise what PEFT's own merge of a copy gives."""

from __future__ import annotations

import copy
from dataclasses import fields

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

from peft import (
    LoHaConfig,
    LoraConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)

from rollout import SamplingParams
from rollout.errors import InvalidInputError
from rollout.trainers import RolloutHook, weight_source
from rollout.weights.adapter_folder import adapter_scaling
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.trainer_checks import (
    digest_of_plain_update,
    engine_of,
    gap,
    hash_of,
    logprobs_of,
    loss_of,
    with_lora,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), sharpness=1.0)


@pytest.fixture
def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def merged_by_peft(model):
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


def is_merged_bitwise(model) -> None:
    held = hash_of(model.state_dict())
    streamed = {name: tensor.clone() for name, tensor in weight_source(model)}
    assert hash_of(streamed) == hash_of(merged_by_peft(model))
    assert held == hash_of(model.state_dict())
    specs = weight_source(model).manifest()
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: tuple(tensor.shape) for name, tensor in streamed.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "target_modules": "all-linear"},
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"modules_to_save": ["norm"], "rank_pattern": {"q_proj": 2}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
    ids=["float32", "bfloat16-with-float32-adapters", "bfloat16"],
)
def test_the_stream_is_the_merged_model(base, options, dtype, autocast):
    model = with_lora(base.to(dtype), **options)
    if not autocast:
        model.to(dtype)
    is_merged_bitwise(model)


def test_several_active_adapters(base):
    model = with_lora(base)
    torch.manual_seed(6)
    other = LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model.add_adapter("other", other)
    alone = hash_of(dict(weight_source(model)))
    source = weight_source(model)
    model.base_model.set_adapter(["default", "other"])
    is_merged_bitwise(model)
    both = hash_of({name: tensor.clone() for name, tensor in source})
    assert both == hash_of(merged_by_peft(model)) != alone
    model.merge_adapter(["default"])  # one is in the base already
    is_merged_bitwise(model)


def test_biases_of_adapters(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(folder, attention_bias=True)
    torch.manual_seed(1)
    is_merged_bitwise(
        with_lora(LlamaForCausalLM(config), target_modules=["q_proj"], lora_bias=True)
    )


def test_the_engine_has_the_trainers_weights(folder, base):
    model = with_lora(base)
    engine = engine_of(folder)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    hook = RolloutHook(engine, model)
    hook.attach(optimizer)
    before = logprobs_of(model)
    loss_of(model).backward()
    optimizer.step()
    assert gap(engine, before) > 0.1
    assert gap(engine, logprobs_of(model)) < 1e-5


def test_in_float32_nothing_is_rounded_on_the_way(base):
    model = with_lora(base.bfloat16())  # adapters in float32
    exact = dict(weight_source(model, dtype="float32"))
    rounded = dict(weight_source(model))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(exact[name], rounded[name].float())
    assert torch.equal(exact[name].bfloat16(), rounded[name])


def adapters_of(model):
    """What PEFT saves: adapters, and modules that are trained whole, by their own names."""
    found = {}
    for name, tensor in get_peft_model_state_dict(model).items():
        is_adapter = ".lora_" in name
        found[name if is_adapter else name.removeprefix("base_model.model.")] = tensor
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_give_the_engine_what_the_merged_weights_give(folder, base, dtype):
    engine = engine_of(folder, dtype)
    base.to(getattr(torch, dtype))
    plain = engine.weights_digest()
    for options in ({"modules_to_save": ["norm"]}, {"target_modules": ["q_proj", "o_proj"]}, {}):
        model = with_lora(copy.deepcopy(base), **options)
        adapters = adapters_of(model)
        if "modules_to_save" not in options:
            adapters["model.norm.weight"] = base.model.norm.weight  # as the last one left it
        wanted = digest_of_plain_update(folder, merged_by_peft(model), dtype)
        engine.update_weights_from_tensor(adapters, lora_scaling=2)
        assert engine.weights_digest() == wanted != plain
    engine.update_weights_from_tensor(base.state_dict())
    assert engine.weights_digest() == plain
    engine.update_weights_from_tensor(adapters, lora_scaling=2.0)
    assert engine.weights_digest() == wanted


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "modules_to_save": ["norm"]}])
def test_a_hook_sends_adapters_alone(folder, base, options):
    saved = {
        name: parameter.detach().clone()
        for name, parameter in base.named_parameters()
        if "modules_to_save" in options and name.endswith("norm.weight")  # as PEFT reads it
    }
    model = with_lora(base, **options)
    engine = engine_of(folder)
    plain = engine.weights_digest()
    hook = RolloutHook(engine, model, adapters_only=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        sent = hook.sync()
        wanted = digest_of_plain_update(folder, merged_by_peft(model), "float32")
        assert engine.weights_digest() == wanted != plain
        assert sent.num_bytes < 0.5 * sum(each.nbytes for each in base.parameters())
        assert gap(engine, logprobs_of(model)) < 1e-4
        loss_of(model).backward()
        optimizer.step()
    engine.update_weights_from_tensor(saved, lora_scaling=1.0)
    assert engine.weights_digest() == plain


def test_adapters_that_only_a_merge_can_express_are_refused(base):
    for options, says in (
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.weight"),
        ({"rank_pattern": {"q_proj": 2}}, "one scaling"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            RolloutHook(None, with_lora(copy.deepcopy(base), **options), adapters_only=True)
    with pytest.raises(InvalidInputError, match="no adapters"):
        RolloutHook(None, base, adapters_only=True)


def test_every_variant_of_lora_is_refused_by_name():
    config = LoraConfig(r=8, lora_alpha=16)
    assert adapter_scaling(config.to_dict()) == 2.0
    variants = [each.name for each in fields(config) if each.metadata.get("is_lora_variant")]
    assert "use_dora" in variants
    for name in variants:
        with pytest.raises(InvalidInputError, match=f"peft_config.{name}"):
            adapter_scaling(config.to_dict() | {name: [1]})


def test_a_folder_of_an_adapter_is_an_update(folder, base, tmp_path):
    engine = engine_of(folder)
    plain = engine.weights_digest()
    for number, options in enumerate(({}, {"use_rslora": True, "modules_to_save": ["norm"]})):
        model = with_lora(copy.deepcopy(base), **options)
        model.save_pretrained(tmp_path / str(number))
        engine.update_weights_from_disk(tmp_path / str(number))
        wanted = digest_of_plain_update(folder, merged_by_peft(model), "float32")
        assert engine.weights_digest() == wanted != plain
    before = engine.weights_digest()
    for options, says in (
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias='all'"),
    ):
        with_lora(copy.deepcopy(base), **options).save_pretrained(tmp_path / says)
        with pytest.raises(InvalidInputError, match=rf"adapter_config\.json\.{says}"):
            engine.update_weights_from_disk(tmp_path / says)
    with pytest.raises(InvalidInputError, match=r"lora_scaling=3\.0: is 4\.0"):
        engine.update_weights_from_disk(tmp_path / "1", lora_scaling=3.0)
    engine.begin_weight_update(lora_scaling=2.0)
    engine.update_weights_from_disk(tmp_path / "0")
    engine.end_weight_update()
    assert engine.weights_digest() != before
    engine.update_weights_from_disk(folder)
    assert engine.weights_digest() == plain


def test_no_adapters_give_the_base_again(folder, base):
    """And what it has computed is not that of the adapted weights."""
    engine = engine_of(folder)
    plain, first = (
        engine.weights_digest(),
        engine.generate([[5, 6, 7, 8]] * 2, SamplingParams(max_new_tokens=6)),
    )
    with pytest.raises(InvalidInputError, match="must bring"):
        engine.update_weights_from_tensor({}, lora_scaling=1.0)
    engine.update_weights_from_tensor(adapters_of(with_lora(base)), lora_scaling=2.0)
    adapted = engine.generate([[5, 6, 7, 8]] * 2, SamplingParams(max_new_tokens=6))
    engine.update_weights_from_tensor({}, lora_scaling=1.0)
    assert engine.weights_digest() == plain
    again = engine.generate([[5, 6, 7, 8]] * 2, SamplingParams(max_new_tokens=6))
    assert [each.logprobs for each in again] == [each.logprobs for each in first]
    assert [each.logprobs for each in again] != [each.logprobs for each in adapted]


def test_wrong_adapters_are_refused_before_anything_is_written(folder, base):
    engine = engine_of(folder)
    before = engine.weights_digest()
    adapters = adapters_of(with_lora(base))
    (name, *_) = adapters
    for given, options, says in (
        (adapters, {}, "lora_scaling"),
        (adapters, {"partial": True}, "lora_scaling"),
        (adapters, {"lora_scaling": float("nan")}, "finite"),
        ({**adapters, name: torch.zeros(4, 5)}, {"lora_scaling": 2}, "must be"),
        ({each: adapters[each] for each in adapters if each != name}, {"lora_scaling": 2}, "needs"),
        ({"x.lora_A.weight": torch.zeros(1, 2), "x.lora_B.weight": torch.zeros(2, 1)},
         {"lora_scaling": 2}, "unexpected: x.weight"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=says):
            engine.update_weights_from_tensor(given, **options)
    assert engine.weights_digest() == before


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "q_proj: DoraLinearVariant"),
        (LoHaConfig(target_modules=["q_proj"]), "q_proj: "),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3]), "TrainableTokens"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PromptTuningConfig"),
    ],
    ids=["dora", "loha", "tokens", "prompt"],
)
def test_other_tuners_are_refused_by_name(base, config, says):
    with pytest.raises(InvalidInputError, match=says):
        weight_source(get_peft_model(base, config))


def test_disabled_adapters_and_tied_targets_are_refused(tmp_path, base):
    model = with_lora(base)
    with model.disable_adapter(), pytest.raises(InvalidInputError, match="disabled"):
        weight_source(model)
    tied = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path, tied=True))
    with pytest.raises(InvalidInputError, match="tied to another"):
        weight_source(with_lora(tied, target_modules=["embed_tokens"]))
