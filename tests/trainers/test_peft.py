"""LoRA merged into the stream: bitwise what PEFT's own merge of a copy gives."""

from __future__ import annotations

import copy
import json
from dataclasses import fields

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

from peft import (
    AdaptionPromptConfig,
    LoHaConfig,
    LoraConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)

from rollout.errors import InvalidInputError
from rollout.trainers import RolloutHook, weight_source
from rollout.weights.adapter_folder import adapter_scaling
from tests.helpers.biased_llama import save_biased_llama
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
    ("options", "dtype", "adapter_dtype"),
    [
        ({}, "float32", "float32"),
        ({"use_rslora": True, "target_modules": "all-linear"}, "bfloat16", "float32"),
        ({"target_modules": ["embed_tokens", "lm_head", "v_proj"]}, "bfloat16", "float32"),
        ({"target_modules": ["embed_tokens"]}, "bfloat16", "bfloat16"),
        ({"modules_to_save": ["norm"], "rank_pattern": {"q_proj": 2}}, "float32", "float32"),
    ],
)
def test_the_stream_is_the_merged_model(base, options, dtype, adapter_dtype):
    model = with_lora(base.to(getattr(torch, dtype)), **options)
    if adapter_dtype == dtype:
        model.to(getattr(torch, dtype))
    is_merged_bitwise(model)


def loaded_tied(path):
    return AutoModelForCausalLM.from_pretrained(save_tiny_llama(path, tied=True))


def test_a_module_saved_beside_its_tied_twin_leaves_the_twin_as_it_was(tmp_path):
    for name in ("embed_tokens", "lm_head"):
        model = with_lora(loaded_tied(tmp_path), modules_to_save=[name])
        is_merged_bitwise(model)
        with pytest.raises(InvalidInputError, match=f"{name}'.*ensure_weight_tying=True"):
            weight_source(model).stream_adapters_only()
        options = {"modules_to_save": [name], "ensure_weight_tying": True}
        weight_source(with_lora(loaded_tied(tmp_path), **options)).stream_adapters_only()
    model = with_lora(loaded_tied(tmp_path), modules_to_save=["embed_tokens"])
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InvalidInputError, match=r"embed_tokens\.weight, which the model ties"):
        engine_of(tmp_path).update_weights_from_disk(tmp_path / "adapter")


def merged_in_place(model):
    model.merge_adapter()
    return model


def follows_each_trained_parameter(model, *, adapters_only):
    """Whether the stream changes with each parameter that is trained."""
    source = weight_source(model)
    if adapters_only:
        source.stream_adapters_only()
    streams = [hash_of(dict(source))]
    for parameter in model.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.add_(1.0)
            streams.append(hash_of(dict(source)))
    return len(set(streams)) == len(streams) > 1


@pytest.mark.parametrize("adapters_only", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"lora_bias": True},
        {"lora_bias": True, "bias": "all"},
        {"bias": "lora_only"},
        {"bias": "all", "modules_to_save": ["norm", "lm_head"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
    ],
)
def test_every_trained_parameter_reaches_the_engine(tmp_path, options, adapters_only):
    folder = save_biased_llama(tmp_path)
    model = with_lora(AutoModelForCausalLM.from_pretrained(folder), **options)
    is_merged_bitwise(model)
    assert follows_each_trained_parameter(copy.deepcopy(model), adapters_only=adapters_only)
    engine = engine_of(folder)
    RolloutHook(engine, model, adapters_only=adapters_only).sync()
    assert engine.weights_digest() == digest_of_plain_update(
        folder, merged_by_peft(model), "float32"
    )
    assert gap(engine, logprobs_of(model)) < 1e-4


def test_whole_tensors_of_an_adapter_come_though_frozen_and_go_with_it(tmp_path):
    folder = save_biased_llama(tmp_path / "base")
    for options, trained in (
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_B.default.bias"),
        ({"bias": "all"}, "bias"),
    ):
        model = with_lora(AutoModelForCausalLM.from_pretrained(folder), **options)
        model.add_adapter("plain", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        for name, parameter in model.named_parameters():
            if trained in name:
                parameter.data += 0.5
        engine = engine_of(folder)
        adapters = ["default"] if "bias" in options else ["default", "plain", "default"]
        for adapter in adapters:
            model.set_adapter(adapter)
            model.requires_grad_(False)
            RolloutHook(engine, model, adapters_only=True).sync()
            assert gap(engine, logprobs_of(model)) < 1e-4, (options, adapter)


def trained_whole(model):
    return model.requires_grad_(True)


def with_a_second(model):
    """Trains an adapter that is not active."""
    model.add_adapter("two", LoraConfig(target_modules=["k_proj"]))
    for name, parameter in model.named_parameters():
        if ".two." in name:
            parameter.requires_grad_(True)
    return model


def with_a_value_head(model):
    model.base_model.model.v_head = nn.Linear(48, 1)
    return model


def test_a_trained_parameter_that_no_weight_takes_is_refused_by_name(folder, base):
    def lora(**options):
        return with_lora(copy.deepcopy(base), **options)

    for model, adapters_only, says in (
        (lora(lora_bias=True), False, r"lora_B\.default\.bias.*lora_bias=False"),
        (with_a_second(lora()), False, r"lora_A\.two\.weight'.*activate its adapter"),
        (trained_whole(lora(modules_to_save=["norm"])), False, r"original_module\.weight.*freeze"),
        (trained_whole(lora()), True, r"q_proj\.base_layer\.weight.*adapters_only=False"),
        (merged_in_place(lora()), True, r"adapters_only='model.*have it merged"),
        (lora(init_lora_weights="pissa"), True, "adapters_only.*'pissa'.*have it merged"),
        (with_a_value_head(lora()), False, "unexpected: v_head"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            RolloutHook(engine_of(folder), model, adapters_only=adapters_only).sync()


def test_adapters_that_are_merged_in_place_are_not_added_again(base):
    model = with_lora(base)
    wanted = hash_of(merged_by_peft(model))
    assert hash_of(dict(weight_source(merged_in_place(model)))) == wanted


def adapters_of(model):
    """What PEFT saves: adapters, and modules that are trained whole, by their own names."""
    found = {}
    for name, tensor in get_peft_model_state_dict(model).items():
        is_adapter = ".lora_" in name
        found[name if is_adapter else name.removeprefix("base_model.model.")] = tensor
    return found


def test_adapters_alone_give_the_engine_what_the_merged_weights_give(folder, base):
    dtype = "bfloat16"
    engine = engine_of(folder, dtype)
    base.bfloat16()
    plain = engine.weights_digest()
    for options in ({"modules_to_save": ["norm"]}, {"target_modules": ["q_proj", "o_proj"]}, {}):
        model = with_lora(copy.deepcopy(base), **options)
        adapters = adapters_of(model)
        if "modules_to_save" not in options:
            adapters["model.norm.weight"] = base.model.norm.weight  # as the last one left it
        wanted = digest_of_plain_update(folder, merged_by_peft(model), dtype)
        engine.update_weights_from_tensor(adapters, lora_scaling=2)
        assert engine.weights_digest() == wanted != plain


def test_a_hook_sends_adapters_alone(folder, base):
    model = with_lora(base, use_rslora=True)
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
    engine.update_weights_from_tensor({}, lora_scaling=1.0)
    assert engine.weights_digest() == plain


def test_adapters_that_only_a_merge_can_express_are_refused(base):
    embedding = with_lora(copy.deepcopy(base), target_modules=["embed_tokens"])
    with pytest.raises(InvalidInputError, match=r"embed_tokens\.weight"):
        RolloutHook(None, embedding, adapters_only=True)
    with pytest.raises(InvalidInputError, match="no adapters"):
        RolloutHook(None, base, adapters_only=True)


def test_every_variant_of_lora_is_refused_by_name():
    config = LoraConfig(r=8, lora_alpha=16)
    assert adapter_scaling(config.to_dict()) == 2.0
    variants = [each.name for each in fields(config) if each.metadata.get("is_lora_variant")]
    assert "use_dora" in variants
    for name in (*variants, "rank_pattern", "alpha_pattern"):
        with pytest.raises(InvalidInputError, match=f"peft_config.{name}"):
            adapter_scaling(config.to_dict() | {name: [1]})


def test_a_folder_of_an_adapter_is_an_update(folder, base, tmp_path):
    engine = engine_of(folder)
    plain = engine.weights_digest()
    ranks = {"q_proj": 2, r"layers\.0\..*_proj": 3}
    alphas = {"^model.layers.1.mlp.down_proj": 3, "proj": 7, "self_attn.q_proj": 32}
    overlapping = {"down_proj": 3, "layers.0.mlp.down_proj": 5}
    for number, options in enumerate((
        {},
        {"use_rslora": True, "modules_to_save": ["norm"]},
        {"rank_pattern": ranks},
        {"alpha_pattern": alphas},
        {"alpha_pattern": overlapping, "rank_pattern": {"q_proj": 2}, "use_rslora": True},
    )):  # fmt: skip
        model = with_lora(copy.deepcopy(base), **options)
        model.save_pretrained(tmp_path / str(number))
        engine.update_weights_from_disk(tmp_path / str(number))
        wanted = digest_of_plain_update(folder, merged_by_peft(model), "float32")
        assert engine.weights_digest() == wanted != plain
    before = engine.weights_digest()
    for options, says in (
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias='all'"),
    ):
        with_lora(copy.deepcopy(base), **options).save_pretrained(tmp_path / says)
        with pytest.raises(InvalidInputError, match=rf"adapter_config\.json\.{says}"):
            engine.update_weights_from_disk(tmp_path / says)
    config = tmp_path / "0" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alpha_pattern": {"(": 1}}))
    with pytest.raises(InvalidInputError, match=r"adapter_config\.json\.alpha_pattern.*regular"):
        engine.update_weights_from_disk(tmp_path / "0")
    with pytest.raises(InvalidInputError, match=r"lora_scaling=3\.0: is 4\.0"):
        engine.update_weights_from_disk(tmp_path / "1", lora_scaling=3.0)
    assert engine.weights_digest() == before
    engine.update_weights_from_disk(folder)
    assert engine.weights_digest() == plain


def test_wrong_adapters_are_refused_before_anything_is_written(folder, base):
    engine = engine_of(folder)
    before = engine.weights_digest()
    adapters = adapters_of(with_lora(base))
    (name, *_) = adapters
    for given, options, says in (
        (adapters, {}, "lora_scaling"),
        (adapters, {"lora_scaling": {"lm_head.weight": 2.0}}, "lora_scaling"),
        ({}, {"lora_scaling": 1}, "must bring"),
        (adapters, {"lora_scaling": float("nan")}, "finite"),
        ({**adapters, name: torch.zeros(4, 5)}, {"lora_scaling": 2}, "must be"),
        ({each: adapters[each] for each in adapters if each != name}, {"lora_scaling": 2}, "needs"),
        ({"x.lora_A.weight": torch.zeros(1, 2), "x.lora_B.weight": torch.zeros(2, 1)},
         {"lora_scaling": 2}, "unexpected: x.weight"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=says):
            engine.update_weights_from_tensor(given, **options)
    assert engine.weights_digest() == before


def test_what_cannot_be_merged_is_refused_by_name(base, tmp_path):
    for config, says in (
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "q_proj: DoraLinearVariant"),
        (LoHaConfig(target_modules=["q_proj"]), "LoHaConfig"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PromptTuningConfig"),
        (
            AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
            "AdaptionPromptConfig",
        ),
        (LoraConfig(trainable_token_indices={"embed_tokens": [1]}), "embed_tokens: Trainable"),
        (LoraConfig(target_parameters=["mlp.up_proj.weight"]), "up_proj: ParamWrapper"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            weight_source(get_peft_model(copy.deepcopy(base), config))
    model = with_lora(base)
    with model.disable_adapter(), pytest.raises(InvalidInputError, match="disabled"):
        weight_source(model)
    with pytest.raises(InvalidInputError, match="tied to another"):
        weight_source(with_lora(loaded_tied(tmp_path), target_modules=["embed_tokens"]))
