"""Run on every rank by test_deepspeed.py: real DeepSpeed engines, one after another.

Writes what was measured, by the name of the case; the tests say what it must be.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import distributed, nn
from transformers import AutoModelForCausalLM

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.trainers import RolloutHook, weight_source
from rollout.trainers.deepspeed import prepare_deepspeed
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.tiny_trainers import save_tiny_trainers
from tests.helpers.trainer_checks import (
    FailingEngine,
    digest_of_plain_update,
    engine_of,
    gap,
    hash_of,
    logprobs_of,
    loss_of,
    slices_of,
    weights_in,
    with_lora,
)

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BUCKET_BYTES = 24 * 1024


def trainer(
    folder: Path,
    stage: int,
    dtype: torch.dtype = torch.float32,
    lora: bool = False,
    **config: Any,
) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if lora:
        model = with_lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": dtype is torch.bfloat16},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        | config,
    )
    return engine


def train_step(engine: nn.Module) -> None:
    engine.backward(loss_of(engine, RANK))
    engine.step()


def gathered_state(engine: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model at once: what a stream of buckets is compared with."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = weights_in(engine.module)
        return {name: tensor.detach().clone() for name, tensor in weights.items()}


def local_state(engine: nn.Module) -> dict[str, torch.Tensor]:
    """The shards that this rank holds."""
    return {
        name: getattr(parameter, "ds_tensor", parameter).detach()
        for name, parameter in engine.module.named_parameters()
    }


def whole_bytes(engine: nn.Module) -> int:
    """The bytes of the ZeRO-3 parameters that are gathered now."""
    return sum(
        parameter.nbytes
        for parameter in engine.module.parameters()
        if getattr(parameter, "ds_status", None) is ZeroParamStatus.AVAILABLE
    )


def peak(engine: nn.Module) -> int:
    """The most of them while any tensor is streamed."""
    source = weight_source(engine, bucket_bytes=BUCKET_BYTES)
    # As a consumer may be; the trainer goes on training afterwards.
    with torch.inference_mode(), source.stream() as stream:
        return max(whole_bytes(engine) for _ in stream)


def follows_the_trainer(folder: Path, stage: int) -> dict[str, Any]:
    """float32: the engine's logprobs, digest, and the memory of one pass."""
    engine = trainer(folder, stage)
    generator = engine_of(folder) if RANK == 0 else None
    hook = RolloutHook(generator, engine, bucket_bytes=BUCKET_BYTES)
    before = logprobs_of(engine)
    train_step(engine)
    held = hash_of(local_state(engine))
    sync = hook.sync()
    result = {
        "version": sync.version,
        "num_tensors": sync.num_tensors,
        "num_bytes": sync.num_bytes,
        "untouched": held == hash_of(local_state(engine)),
        "peak": peak(engine),
        "whole_after": whole_bytes(engine),
    }
    expected, state = logprobs_of(engine), gathered_state(engine)
    result["moved"] = max(abs(a - b) for a, b in zip(before, expected, strict=True))
    if generator is not None:
        result["gap"] = gap(generator, expected)
        result["same_digest"] = generator.weights_digest() == digest_of_plain_update(
            folder, state, "float32"
        )
    train_step(engine)  # a pass leaves the trainer able to go on
    return result


def follows_with_lora(folder: Path, stage: int) -> dict[str, Any]:
    """Adapters and base are gathered together and merged; PEFT's own merge says what is right."""
    engine = trainer(folder, stage, lora=True)
    train_step(engine)
    generator = engine_of(folder) if RANK == 0 else None
    sync = RolloutHook(generator, engine, bucket_bytes=BUCKET_BYTES).sync()
    expected, state = logprobs_of(engine), gathered_state(engine)
    result: dict[str, Any] = {"num_tensors": sync.num_tensors, "num_bytes": sync.num_bytes}
    if generator is not None:
        plain = with_lora(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        plain.load_state_dict(state)
        merged = dict(plain.merge_and_unload().named_parameters())
        result["gap"] = gap(generator, expected)
        result["same_digest"] = generator.weights_digest() == digest_of_plain_update(
            folder, merged, "float32"
        )
    return result


def master_or_model(folder: Path, stage: int) -> dict[str, Any]:
    """bfloat16 training: the model's weights, or the float32 copies they are rounded from."""
    engine = trainer(folder, stage, torch.bfloat16)
    train_step(engine)
    generator = engine_of(folder, "bfloat16") if RANK == 0 else None
    sync = RolloutHook(generator, engine, bucket_bytes=BUCKET_BYTES).sync()
    state = gathered_state(engine)
    with weight_source(engine, bucket_bytes=BUCKET_BYTES, dtype="float32").stream() as stream:
        specs = stream.manifest()
        masters = {name: tensor.clone() for name, tensor in stream}
    result = {
        "num_bytes": sync.num_bytes,
        "specs_hold": all(
            (spec.shape, spec.dtype) == (tuple(masters[name].shape), masters[name].dtype)
            for name, spec in specs.items()
        )
        and list(specs) == list(masters),
        "rounds_to_model": all(
            torch.equal(masters[name].bfloat16(), tensor) for name, tensor in state.items()
        ),
        "finer": max(float((masters[n] - t).abs().max()) for n, t in state.items()),
    }
    if generator is not None:
        result["same_digest"] = generator.weights_digest() == digest_of_plain_update(
            folder, state, "bfloat16"
        )
    return result


def tensor_parallel(folder: Path, stage: int) -> dict[str, Any]:
    """One engine on all ranks, which are the trainer's: of the model's weights, and of masters."""
    engine = trainer(folder, stage, torch.bfloat16)
    train_step(engine)
    return {
        dtype: slices_of(folder, engine, dtype, bucket_bytes=BUCKET_BYTES)
        for dtype in ("bfloat16", "float32")
    }


def failures(folder: Path, stage: int) -> dict[str, Any]:
    """A rank's engine fails at several points: all raise, none hangs, the next sync is whole."""
    engine = trainer(folder, stage)
    result: dict[str, Any] = {"raised": {}}
    for takes in (0, 1, 2, 9, 20, 21, 1000):
        failing = FailingEngine(takes) if RANK == RANKS - 1 else None
        try:
            RolloutHook(failing, engine, bucket_bytes=BUCKET_BYTES).sync()
        except WeightUpdateError as error:
            result["raised"][takes] = str(error)
    generator = engine_of(folder) if RANK == 0 else None
    result["version"] = RolloutHook(generator, engine, bucket_bytes=BUCKET_BYTES).sync().version
    expected = logprobs_of(engine)
    if generator is not None:
        result["gap"] = gap(generator, expected)
    try:
        RolloutHook(None, engine).sync()
    except InvalidInputError as error:
        result["nobody"] = error.field
    # One engine of two fails in the middle: the other must not serve half of an update either.
    other = FailingEngine(9) if generator is None else generator
    try:
        RolloutHook(other, engine, bucket_bytes=BUCKET_BYTES).sync()
    except WeightUpdateError:
        result["serves"] = generator is None or generator.can_run
    return result


def callbacks(folder: Path, stage: int) -> dict[str, Any]:
    """The hook as DeepSpeed's own callback, with gradient accumulation."""
    engine = trainer(folder, stage, gradient_accumulation_steps=2, train_batch_size=4 * RANKS)
    generator = engine_of(folder) if RANK == 0 else None
    hook = RolloutHook(generator, engine, every=2, bucket_bytes=BUCKET_BYTES)
    inner = engine.optimizer.optimizer
    old = hash_of(local_state(engine))
    seen: list[bool] = []
    handle = inner.register_step_post_hook(
        lambda *_: seen.append(hash_of(local_state(engine)) == old)
    )
    train_step(engine)
    train_step(engine)
    handle.remove()
    remove = hook.attach(engine)
    versions = []
    for _ in range(8):
        train_step(engine)
        versions.append(-1 if generator is None else generator.weight_version)
    remove()
    train_step(engine)
    train_step(engine)
    refused = []
    for stepper in (inner, engine.optimizer):
        try:
            hook.attach(stepper)
        except InvalidInputError as error:
            refused.append(error.field)
    return {
        "versions": versions,
        "num_steps": hook.num_steps,
        "old_inside_the_optimizer": seen,
        "refused": refused,
    }


def main(output: str) -> None:
    prepare_deepspeed()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        # Before there is a group, in which transformers writes on one rank alone.
        families = save_tiny_trainers(Path(temporary) / "families")
        deepspeed.init_distributed("gloo")
        untied = save_tiny_llama(Path(temporary) / "untied", sharpness=1.0)
        tied = save_tiny_llama(Path(temporary) / "tied", tied=True)
        experts = save_tiny_moe(Path(temporary) / "experts", sharpness=1.0)
        cases = {f"follows-{stage}": (follows_the_trainer, untied, stage) for stage in range(4)}
        cases |= {f"master-{stage}": (master_or_model, untied, stage) for stage in range(4)}
        cases["follows-3-tied"] = (follows_the_trainer, tied, 3)
        cases["follows-3-experts"] = (follows_the_trainer, experts, 3)
        cases["callbacks-3"] = (callbacks, untied, 3)
        if RANKS == 1:
            cases["callbacks-2"] = (callbacks, untied, 2)
        else:
            cases["failures-3"] = (failures, untied, 3)
            cases["lora-3"] = (follows_with_lora, untied, 3)
            cases["tensor-3"] = (tensor_parallel, untied, 3)
            cases["tensor-3-experts"] = (tensor_parallel, experts, 3)
            for name, folder in families.items():
                cases[f"follows-3-{name}"] = (follows_the_trainer, folder, 3)
                cases[f"tensor-3-{name}"] = (tensor_parallel, folder, 3)
        for name, (case, folder, stage) in cases.items():
            started = time.perf_counter()
            results[name] = case(folder, stage)
            results[name]["seconds"] = round(time.perf_counter() - started, 2)
    Path(output).write_text(json.dumps(results))
    # DeepSpeed's teardown of two gloo ranks sometimes aborts after all is done.
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
