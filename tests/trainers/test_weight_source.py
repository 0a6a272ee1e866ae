"""Plain models into the engine, and what `weight_source` refuses."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.trainers import RolloutHook, weight_source
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.trainer_checks import (
    FailingEngine,
    engine_of,
    gap,
    hash_of,
    logprobs_of,
    loss_of,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), sharpness=1.0)


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def model(folder):
    return loaded(folder)


MODELS = {
    "untied": partial(save_tiny_llama, sharpness=1.0),
    "tied": partial(save_tiny_llama, tied=True),
    "experts": partial(save_tiny_moe, sharpness=1.0),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_engine_has_the_trainers_weights(kind, tmp_path):
    folder = MODELS[kind](tmp_path / "model")
    model, engine = loaded(folder), engine_of(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = RolloutHook(engine, model)
    before = logprobs_of(model)
    loss_of(model).backward()
    optimizer.step()
    held = hash_of(model.state_dict())
    sync = hook.sync()
    expected = logprobs_of(model)
    assert gap(engine, before) > 0.1
    assert gap(engine, expected) < 1e-5
    assert held == hash_of(model.state_dict())
    tensors = dict(model.named_parameters())
    model.save_pretrained(tmp_path / "new")
    digest = engine.weights_digest()
    engine.update_weights_from_disk(str(tmp_path / "new"))
    assert engine.weights_digest() == digest
    assert (sync.version, sync.num_tensors) == (1, len(tensors))
    assert sync.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_dtypes_are_as_asked(model):
    half = copy.deepcopy(model).bfloat16()
    assert {tensor.dtype for _, tensor in weight_source(half)} == {torch.bfloat16}
    whole = dict(weight_source(half, dtype="float32"))
    assert all(torch.equal(whole[n], t.float()) for n, t in half.named_parameters())
    assert {spec.dtype for spec in weight_source(half, dtype="float16").manifest().values()} == {
        torch.float16
    }


def test_every_nth_step_syncs(folder, model):
    engine = engine_of(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = RolloutHook(engine, model, every=3)
    synced = []
    for _ in range(7):
        optimizer.step()
        synced.append(hook.step() is not None)
    assert synced == [False, False, True, False, False, True, False]
    assert engine.weight_version == 2


class Careless(FailingEngine):
    def update_weights_from_tensor(self, named_tensors, **options):
        next(iter(named_tensors))


def test_an_engine_that_fails_is_heard(model):
    for engine, error, says in (
        (Careless(1), WeightUpdateError, "returned before it had taken"),
        (FailingEngine(0), WeightUpdateError, "on purpose"),
        (FailingEngine(1000), WeightUpdateError, "on purpose"),
    ):
        with pytest.raises(error, match=says):
            RolloutHook(engine, model).sync()


class Actor(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.policy = model


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model


def test_what_cannot_be_streamed_is_refused_by_name(model):
    def refused(match, *arguments, **options):
        with pytest.raises(InvalidInputError, match=match):
            RolloutHook(FailingEngine(1), *arguments, **options)

    refused("Actor.*hand over its .policy", Actor(model))
    refused("Wrapper.*hand over its .module", Wrapper(nn.Linear(2, 2)))
    refused("must be a torch.nn.Module", {"weight": 1})
    refused("every=0", model, every=0)
    refused("dtype='int8'", model, dtype="int8")
    refused("bucket_bytes=0", model, bucket_bytes=0)
    refused("weight_version=3", model, weight_version=3)
    with torch.device("meta"):
        refused("lm_head.weight.device='meta'", nn.ModuleDict({"lm_head": nn.Linear(2, 2)}))
    model.model.norm.weight = nn.Parameter(torch.ones(48, dtype=torch.int8), requires_grad=False)
    refused("model.model.norm.weight.dtype=torch.int8", model)
