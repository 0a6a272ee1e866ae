"""Two ranks of real trainers: ``python -m tests.trainers.trainer_ranks out.json``, as `launch`
starts it.

CASES holds, as JSON, the check, trainer, model and options of each case. Raises where one fails.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rollout import RolloutEngine
from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.trainers import RolloutHook, weight_source
from rollout.trainers.deepspeed import prepare_deepspeed
from rollout.weights.manifest import TensorSpec
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.tiny_deepseek import save_tiny_deepseek
from tests.helpers.tiny_families import save_tiny_family
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
    with_lora,
)

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BUCKET_BYTES = 24 * 1024

# torch multiplies experts in bfloat16 by rows of multiples of 16 bytes alone.
_sparse = partial(save_tiny_deepseek, hidden_size=48, moe_intermediate_size=24, sharpness=1.0)
MODELS: dict[str, Callable[[Path], Path]] = {
    "untied": partial(save_tiny_llama, sharpness=1.0),
    "tied": partial(save_tiny_llama, tied=True),
    "one kv head": partial(save_tiny_llama, num_kv_heads=1),
    "experts": partial(save_tiny_moe, sharpness=1.0),
    "latent": partial(_sparse, family="deepseek_v3"),
    "glm-moe": partial(_sparse, family="glm4_moe"),
    "gpt-oss": partial(save_tiny_family, name="gpt-oss", sharpness=1.0),
    "gemma": partial(save_tiny_family, name="gemma2", sharpness=1.0),
}


class ZeroTrainer:
    """A DeepSpeed engine."""

    def __init__(self, model: nn.Module, stage: int, **config: Any) -> None:
        self.model, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer_of(model),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "bf16": {"enabled": model.dtype is torch.bfloat16},
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            }
            | config,
        )

    def step(self) -> None:
        self.model.backward(loss_of(self.model, RANK))
        self.model.step()

    def gathered(self) -> dict[str, torch.Tensor]:
        """The whole model at once: what a stream of buckets is compared with."""
        with deepspeed.zero.GatheredParameters(list(self.model.module.parameters())):
            state = self.model.module.state_dict()
            return {name: tensor.detach().clone() for name, tensor in state.items()}

    def shards(self) -> dict[str, torch.Tensor]:
        """The tensors that this rank holds between two steps."""
        return {
            name: getattr(parameter, "ds_tensor", parameter).detach()
            for name, parameter in self.model.module.named_parameters()
        }


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):  # a decoder layer of any family
            fully_shard(module, **options)
    return fully_shard(model, **options)


def fsdp1(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": fsdp2,
    "fsdp1": partial(fsdp1, use_orig_params=True),
    "fsdp1-flat": partial(fsdp1, use_orig_params=False),
    "ddp": DistributedDataParallel,
}


class TorchTrainer:
    """A model in one of torch's own wrappers."""

    def __init__(self, model: nn.Module, wrapper: str) -> None:
        self.model = WRAPPERS[wrapper](model)
        self._optimizer = optimizer_of(self.model)

    def step(self) -> None:
        loss_of(self.model, RANK).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gathered(self) -> dict[str, torch.Tensor]:
        """The whole model at once, by torch's own checkpointing."""
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))

    def shards(self) -> dict[str, torch.Tensor]:
        """The tensors that this rank holds between two steps."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {
            name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for name, parameter in self.model.named_parameters()
        }


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def loaded(folder: Path, dtype: str, adapters: Sequence[str] | None) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model if adapters is None else with_lora(model, target_modules=list(adapters))


def trainer_of(
    kind: str,
    folder: Path,
    dtype: str = "float32",
    adapters: Sequence[str] | None = None,
    **config: Any,
) -> ZeroTrainer | TorchTrainer:
    model = loaded(folder, dtype, adapters)
    if kind.startswith("zero-"):
        return ZeroTrainer(model, int(kind[-1]), **config)
    return TorchTrainer(model, kind)


def of_rank_0(folder: Path, dtype: str = "float32") -> RolloutEngine | None:
    return engine_of(folder, dtype) if RANK == 0 else None


def follows(kind: str, folder: Path, adapters: Sequence[str] | None = None) -> None:
    """The engine has the trainer's weights after a step; the trainer is left as it was."""
    trainer, engine = trainer_of(kind, folder, adapters=adapters), of_rank_0(folder)
    hook = RolloutHook(engine, trainer.model, bucket_bytes=BUCKET_BYTES)
    before = logprobs_of(trainer.model)
    trainer.step()
    sync = hook.step()
    expected, held = logprobs_of(trainer.model), hash_of(trainer.shards())
    assert max(abs(a - b) for a, b in zip(before, expected, strict=True)) > 0.1
    # As a consumer may be; the trainer goes on training afterwards.
    with torch.inference_mode(), hook.source.stream() as stream:
        for _ in stream:
            pass
    assert held == hash_of(trainer.shards())
    plain = loaded(folder, "float32", adapters)
    plain.load_state_dict(trainer.gathered(), strict=False)
    if adapters is not None:
        plain = plain.merge_and_unload()
    whole = weights_in(plain)
    assert sync is not None
    assert (sync.version, sync.num_tensors) == (1, len(whole))
    assert sync.num_bytes == sum(tensor.nbytes for tensor in whole.values())
    if engine is not None:
        assert gap(engine, expected) < 1e-5
        assert engine.weights_digest() == digest_of_plain_update(folder, whole, "float32")
    trainer.step()


def weights_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters, and the routers' correction biases, which are buffers."""
    buffers = model.named_buffers()
    biases = {name: each for name, each in buffers if name.endswith("e_score_correction_bias")}
    return dict(model.named_parameters()) | biases


def gathers_few_tensors_at_a_time(kind: str, folder: Path) -> None:
    """A bucket, beside what it is gathered from; the model is of seven."""
    trainer = trainer_of(kind, folder)
    trainer.step()
    with LiveBytes() as live:
        for _ in weight_source(trainer.model, bucket_bytes=BUCKET_BYTES):
            pass
    assert BUCKET_BYTES < live.peak < 4 * BUCKET_BYTES


def masters_come_on_request(kind: str, folder: Path) -> None:
    """bfloat16 training: the model's weights, or the float32 copies they are rounded from."""
    trainer, engine = trainer_of(kind, folder, "bfloat16"), of_rank_0(folder, "bfloat16")
    trainer.step()
    RolloutHook(engine, trainer.model, bucket_bytes=BUCKET_BYTES).sync()
    state = dict(trainer.gathered())
    source = weight_source(trainer.model, bucket_bytes=BUCKET_BYTES, dtype="float32")
    with source.stream() as stream:
        specs = stream.manifest()
        masters = {name: tensor.clone() for name, tensor in stream}
    assert {name: TensorSpec.of(tensor) for name, tensor in masters.items()} == dict(specs)
    assert list(specs) == list(masters)
    assert all(torch.equal(masters[name].bfloat16(), tensor) for name, tensor in state.items())
    assert not any(torch.equal(masters[name], t.float()) for name, t in state.items() if t.ndim > 1)
    if engine is not None:
        assert engine.weights_digest() == digest_of_plain_update(folder, state, "bfloat16")


def a_failure_is_raised_on_every_rank(kind: str, folder: Path) -> None:
    """One rank's engine fails at several points: none hangs, and the next sync is whole."""
    trainer = trainer_of(kind, folder)
    raised = "engine fails on purpose" if RANK else "failed on rank 1"
    for takes in (0, 1, 9, 21, 1000):
        failing = FailingEngine(takes) if RANK else None
        with pytest.raises(WeightUpdateError, match=raised):
            RolloutHook(failing, trainer.model, bucket_bytes=BUCKET_BYTES).sync()
    engine = of_rank_0(folder)
    hook = RolloutHook(engine, trainer.model, bucket_bytes=BUCKET_BYTES)
    assert hook.sync().version == 1
    expected = logprobs_of(trainer.model)
    assert engine is None or gap(engine, expected) < 1e-5
    with pytest.raises(InvalidInputError, match="engine"):
        RolloutHook(None, trainer.model).sync()
    # One engine of two fails in the middle: the other must not serve half of an update either.
    hook = RolloutHook(engine or FailingEngine(9), trainer.model, bucket_bytes=BUCKET_BYTES)
    with pytest.raises(WeightUpdateError):
        hook.sync()
    assert engine is None or not engine.can_run


def reaches_tensor_parallel_ranks(
    kind: str,
    folder: Path,
    trained: str = "float32",
    dtypes: Sequence[str] = ("bfloat16",),
    adapters: Sequence[str] | None = None,
    sent: str = "slices",
) -> None:
    """A sync of one engine on all ranks leaves what an update by whole tensors leaves.

    ``sent``: whether ``slices`` are sent and never a whole tensor, tensors are gathered and ``cut``
    for the engine, or come ``whole`` now and then.
    """
    trainer = trainer_of(kind, folder, trained, adapters)
    trainer.step()
    for dtype in dtypes:
        engine = tensor_parallel_engine(folder, dtype)
        hook = RolloutHook(engine, trainer.model, dtype=dtype, bucket_bytes=BUCKET_BYTES)
        with LiveBytes() as live:
            sync = hook.sync()
        found = engine.weights_digest()
        with hook.source.stream() as stream:
            engine.update_weights_from_tensor((name, tensor) for name, tensor in stream)
        assert found == engine.weights_digest(), dtype
        sizes = [spec.num_bytes for spec in hook.source.manifest().values()]
        if sent != "whole":
            assert sync.num_bytes < 0.6 * sum(sizes), dtype
        if sent == "slices":
            assert live.largest < max(sizes), dtype
            assert live.peak <= max(BUCKET_BYTES, *sizes) + 1024, dtype


def tensor_parallel_engine(folder: Path, dtype: str) -> RolloutEngine:
    """One engine on all ranks."""
    parallel = {"mode": "tensor", "size": RANKS, "timeout": HANG_SECONDS}
    return RolloutEngine.from_pretrained(
        str(folder), spec="none", dtype=dtype, device="cpu", max_context_len=64,
        parallel=parallel,
    )  # fmt: skip


def what_one_rank_of_the_engine_refuses_reaches_none(kind: str, folder: Path) -> None:
    trainer, engine = trainer_of(kind, folder), tensor_parallel_engine(folder, "float32")
    before = engine.weights_digest()
    options, match = ({"selector": "nobody"}, "this worker has") if RANK else ({}, "^rank 1: ")
    with pytest.raises(RolloutError, match=match):
        RolloutHook(engine, trainer.model, **options).sync()
    assert RANK or engine.can_run
    assert engine.weights_digest() == before


def it_syncs_after_whole_steps(kind: str, folder: Path) -> None:
    """Two micro-batches make a step, two steps a sync."""
    batch = {"gradient_accumulation_steps": 2, "train_batch_size": 4 * RANKS}
    trainer, engine = trainer_of(kind, folder, **batch), of_rank_0(folder)
    hook = RolloutHook(engine, trainer.model, every=2, bucket_bytes=BUCKET_BYTES)
    for version in (0, 0, 0, 1, 1, 1, 1, 2):
        trainer.step()
        hook.step()
        assert engine is None or engine.weight_version == version
    assert hook.num_steps == 4


def main(output: str) -> None:
    prepare_deepspeed()
    cases = json.loads(os.environ["CASES"])
    with tempfile.TemporaryDirectory() as folder:
        # Before there is a group, in which transformers writes on one rank alone.
        names = {model for _, _, model, _ in cases}
        models = {name: MODELS[name](Path(folder) / name) for name in names}
        deepspeed.init_distributed("gloo")
        for check, kind, model, options in cases:
            print(check, kind, model, options, flush=True)
            globals()[check](kind, models[model], **options)
    Path(output).write_text("null")
    # DeepSpeed's teardown of two gloo ranks sometimes aborts after all is done.
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
