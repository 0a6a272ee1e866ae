"""Qwen3-Next and Qwen3.5 are what transformers computes, under the names it and checkpoints use."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3_5VisionConfig,
)

from rollout.config import DType
from rollout.models.loader import load_model
from rollout.weights.source import TensorSource
from rollout.weights.transaction import WeightTransaction
from rollout.weights.update_options import UpdateOptions
from tests.helpers.dense_attention import (
    DenseStates,
    GrowingAttention,
    logits_of,
)
from tests.helpers.tiny_hybrid import randomise, save_tiny_hybrid, tiny_hybrid

CPU = torch.device("cpu")
FAMILIES = ("qwen3_5", "qwen3_next")
PROMPTS = [[5, 9, 11, 3, 70, 12, 9, 9, 41], [1], [96, 0, 2, 7]]


def load(folder, dtype=DType.auto, **options):
    return load_model(folder, dtype, CPU, **options)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def transformers_logits(model, tokens, **options):
    return model(torch.tensor([tokens]), **options).logits[0]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@torch.inference_mode()
def test_decode_token_by_token(family, tmp_path):
    model, theirs = load(save_tiny_hybrid(tmp_path, family)), tiny_hybrid(family)
    attention, kept = GrowingAttention(), DenseStates(model.spec, num_slots=2)
    prompt, forced = PROMPTS[0], [8, 8, 90, 1, 33, 61, 2, 5]
    cache = None
    for step, tokens in enumerate([prompt, *([token] for token in forced)]):
        start = 0 if step == 0 else len(prompt) + step - 1
        source, target = (0 if step == 0 else 2 - step % 2), 1 + step % 2
        states = kept.begin([len(tokens)], [source], [target])
        positions = torch.arange(start, start + len(tokens))
        hidden = model.forward(torch.tensor(tokens), positions, attention, states=states)
        answer = theirs(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        close(model.logits(hidden), answer.logits[0])


@pytest.mark.parametrize(("dtype", "packing"), [(DType.float32, False), (DType.bfloat16, True)])
def test_every_tensor_reads_back_as_it_was_written(family, packing, dtype, tmp_path):
    """Also after memory was given back."""
    model = load(save_tiny_hybrid(tmp_path, family), dtype, packing=packing)
    before = logits_of(model, PROMPTS)
    stored = load_file(tmp_path / "model.safetensors")
    weight_loaders = model.weight_loaders()
    required = {name for name, loader in weight_loaders.items() if loader.required}
    assert required == stored.keys() == tiny_hybrid(family).state_dict().keys()
    kept = {name: weight_loaders[name].read() for name in required}
    for name, values in stored.items():
        dtype = torch.float32 if name.endswith(("A_log", "dt_bias")) else model.dtype
        assert torch.equal(kept[name], values.to(dtype)), name
    assert model.release() >= sum(values.nbytes for values in kept.values())
    assert model.release() == 0
    model.allocate()
    for name in required:
        model.weight_loaders()[name].write(kept[name])
    model.finish_loading()
    for ours, again in zip(before, logits_of(model, PROMPTS), strict=True):
        assert torch.equal(ours, again)


@pytest.mark.parametrize(("tied", "packing"), [(False, True), (True, False)])
def test_logits_are_those_of_transformers_and_an_update_is_a_load(family, packing, tied, tmp_path):
    model = load(save_tiny_hybrid(tmp_path / "old", family, tied=tied), packing=packing)
    theirs = tiny_hybrid(family, tied=tied)
    for prompt, ours in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
        close(ours, transformers_logits(theirs, prompt))
    trainer = tiny_hybrid(family, tied=tied, seed=1)
    trainer.save_pretrained(tmp_path / "new")
    update(model, trainer)
    fresh = load(tmp_path / "new", packing=packing)
    for ours, theirs in zip(logits_of(model, PROMPTS), logits_of(fresh, PROMPTS), strict=True):
        assert torch.equal(ours, theirs)


def update(model, trainer) -> None:
    transaction = WeightTransaction({"target": model}, passes_over=model.spec.passes_over)
    transaction.begin(UpdateOptions())
    transaction.load(TensorSource(trainer.state_dict()))
    transaction.commit()


@pytest.fixture
def seeing(tmp_path):
    """A checkpoint with a vision tower, a chain that predicts, and the model it was saved from."""
    text = tiny_hybrid("qwen3_5").config.to_dict()
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    vision = Qwen3_5VisionConfig(
        depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=48,
        num_position_embeddings=4,
    )  # fmt: skip
    config = Qwen3_5Config(text_config=Qwen3_5TextConfig(**text), vision_config=vision)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    randomise(model, seed=3)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["mtp.fc.weight"] = torch.zeros(48, 96)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, model


@pytest.mark.parametrize("sees", [False, True])
def test_trainers_may_hold_either_form_of_a_qwen3_5(sees, seeing, tmp_path_factory):
    """A text model is trained from a checkpoint that sees, and the other way round."""
    folder, trainer = seeing
    if sees:
        model = load(folder)
        assert model.spec.architecture == "Qwen3_5ForConditionalGeneration"
        for prompt, ours in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
            close(ours, transformers_logits(trainer, prompt))
        trainer = tiny_hybrid("qwen3_5", seed=1)
    else:
        model = load(save_tiny_hybrid(tmp_path_factory.mktemp("text"), "qwen3_5"))
    assert any("visual" in name for name in trainer.state_dict()) != sees
    update(model, trainer)
    for prompt, ours in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
        close(ours, transformers_logits(trainer, prompt))
