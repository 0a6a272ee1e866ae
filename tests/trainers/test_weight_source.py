"""Plain models into the engine, and what `weight_source` refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.trainers import RolloutHook, weight_source
from rollout.trainers.param_ref import checkpoint_name
from rollout.weights.manifest import TensorSpec
from rollout.weights.named_tensors import WeightSource
from tests.helpers.tiny_deepseek import save_tiny_deepseek
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.trainer_checks import (
    FailingEngine,
    digest_of_plain_update,
    engine_of,
    gap,
    hash_of,
    logprobs_of,
    loss_of,
)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return save_tiny_llama(path, tied=request.param, sharpness=1.0)


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_the_engine_has_the_trainers_weights(folder, model):
    engine = engine_of(folder)
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
    assert engine.weights_digest() == digest_of_plain_update(folder, tensors, "float32")
    assert (sync.version, sync.num_tensors) == (1, len(tensors))
    assert sync.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert hook.last is sync


def test_experts_are_fused_in_the_trainers_memory(tmp_path):
    folder = save_tiny_moe(tmp_path, sharpness=1.0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = engine_of(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook = RolloutHook(engine, model)
    before = logprobs_of(model)
    loss_of(model).backward()
    optimizer.step()
    sync = hook.sync()
    assert gap(engine, before) > 0.1
    assert gap(engine, logprobs_of(model)) < 1e-5
    assert sync.num_tensors == len(dict(model.named_parameters()))
    model.save_pretrained(tmp_path / "new")
    digest = engine.weights_digest()
    engine.update_weights_from_disk(str(tmp_path / "new"))
    assert engine.weights_digest() == digest


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_routers_correction_bias_is_streamed_although_it_is_a_buffer(family, tmp_path):
    folder = save_tiny_deepseek(tmp_path, family, sharpness=1.0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = engine_of(folder)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.neg_()
    expected = logprobs_of(model)
    assert gap(engine, expected) > 1e-3
    RolloutHook(engine, model).sync()
    assert gap(engine, expected) < 1e-5


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "DataParallel"])
def test_names_are_the_checkpoints_own(model, wrap):
    model.register_buffer("running", torch.zeros(3))
    source = weight_source(wrap(model))
    assert isinstance(source, WeightSource)
    assert list(source.manifest()) == [name for name, _ in model.named_parameters()]
    assert all(source.manifest()[name] == TensorSpec.of(tensor) for name, tensor in source)


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module.lm_head.weight", "lm_head.weight"),
        ("module.module._orig_mod.lm_head.weight", "lm_head.weight"),
        ("_fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.mlp._checkpoint_wrapped_module"
         ".up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("module.base_model.model.model.norm.weight", "model.norm.weight"),
        ("base_model.model.lm_head.base_layer.weight", "lm_head.weight"),
        ("model.module.weight", "model.module.weight"),
    ],
)  # fmt: skip
def test_wrappers_leave_no_trace_in_names(wrapped, plain):
    assert checkpoint_name(wrapped) == plain


def test_dtypes_are_as_asked(model):
    half = copy.deepcopy(model).bfloat16()
    assert {tensor.dtype for _, tensor in weight_source(half)} == {torch.bfloat16}
    whole = dict(weight_source(half, dtype="float32"))
    assert all(torch.equal(whole[n], t.float()) for n, t in half.named_parameters())
    assert {spec.dtype for spec in weight_source(half, dtype="float16").manifest().values()} == {
        torch.float16
    }


def test_what_follows_a_sync_is_called_where_an_engine_is(folder, model):
    engine, seen = engine_of(folder), []

    def after_sync(sync):
        seen.append((sync, engine.weight_version, hook.last is sync))

    hook = RolloutHook(engine, model, every=2, after_sync=after_sync)
    assert hook.step() is None
    sync = hook.step()
    assert seen == [(sync, 1, True)]
    failing = RolloutHook(FailingEngine(takes=1), model, after_sync=seen.append)
    with pytest.raises(WeightUpdateError):
        failing.sync()
    assert len(seen) == 1


def test_every_nth_step_syncs(folder, model):
    engine = engine_of(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = RolloutHook(engine, model, every=3)
    remove = hook.attach(optimizer)
    versions = []
    for _ in range(7):
        optimizer.step()
        versions.append(engine.weight_version)
    remove()
    optimizer.step()
    optimizer.step()
    assert versions == [0, 0, 1, 1, 1, 2, 2]
    assert hook.step() is None
    assert hook.step() is not None
    assert engine.weight_version == 3
    handle = optimizer.register_step_post_hook(hook.after_step)
    optimizer.step()
    handle.remove()
    assert hook.num_steps == 10


def test_an_engine_out_of_reach_is_heard(model):
    class Gone(FailingEngine):
        @property
        def weight_version(self):
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        RolloutHook(Gone(1), model).sync()


@pytest.mark.parametrize("takes", [0, 5, 1000])
def test_a_failing_engine_is_heard(folder, model, takes):
    with pytest.raises(WeightUpdateError, match="on purpose"):
        RolloutHook(FailingEngine(takes), model).sync()


def test_an_engine_that_leaves_early_is_an_error(model):
    class Careless(FailingEngine):
        def update_weights_from_tensor(self, named_tensors, **options):
            next(iter(named_tensors))

    with pytest.raises(WeightUpdateError, match="returned before it had taken"):
        RolloutHook(Careless(1), model).sync()


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
