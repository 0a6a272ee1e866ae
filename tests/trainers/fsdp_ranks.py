"""Run on two ranks by test_fsdp.py: models sharded by torch's FSDP1 and FSDP2, one after another.

Writes what was measured, by the name of the case; the tests say what it must be.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rollout.errors import RolloutError, WeightUpdateError
from rollout.models.layers.weight_loader import TensorSlice
from rollout.trainers import RolloutHook, weight_source
from rollout.trainers.shard_exchange import FlatShard, ShardExchange
from rollout.weights.manifest import Manifest, Slices, TensorSpec
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.tiny_trainers import LORA_TARGETS, save_tiny_trainers
from tests.helpers.trainer_checks import (
    FailingEngine,
    digest_of_plain_update,
    engine_of,
    gap,
    hash_of,
    logprobs_of,
    loss_of,
    slices_of,
    tensor_parallel_engine,
    weights_in,
    with_lora,
)

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BUCKET_BYTES = 24 * 1024
Wrap = Callable[[nn.Module], nn.Module]


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


def follows_the_trainer(
    folder: Path, wrap: Wrap, *, lora: bool = False, **adapters: Any
) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        model = with_lora(model, **adapters)
    reference = copy.deepcopy(model)
    model = wrap(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = engine_of(folder) if RANK == 0 else None
    hook = RolloutHook(generator, model, bucket_bytes=BUCKET_BYTES)
    before = logprobs_of(model)
    remove = hook.attach(optimizer)
    loss_of(model, RANK).backward()
    optimizer.step()
    remove()
    optimizer.zero_grad()
    sync = hook.last
    assert sync is not None
    expected = logprobs_of(model)
    held = hash_of(shards(model))
    result = {
        "version": sync.version,
        "num_tensors": sync.num_tensors,
        "num_bytes": sync.num_bytes,
        "moved": max(abs(a - b) for a, b in zip(before, expected, strict=True)),
        "peak": peak(model),
        "untouched": held == hash_of(shards(model)),
    }
    state = gathered_state(model, reference, lora=lora)
    if generator is not None:
        result["gap"] = gap(generator, expected)
        result["same_digest"] = generator.weights_digest() == digest_of_plain_update(
            folder, state, "float32"
        )
    loss_of(model, RANK).backward()  # a pass leaves the trainer able to go on
    optimizer.step()
    return result


def gathered_state(model: nn.Module, reference: nn.Module, *, lora: bool) -> dict:
    """The whole model at once, by torch's own checkpointing, merged by PEFT itself."""
    options = StateDictOptions(full_state_dict=True)
    reference.load_state_dict(get_model_state_dict(model, options=options), strict=False)
    return weights_in(reference.merge_and_unload() if lora else reference)


def shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that this rank holds between two steps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }


def peak(model: nn.Module) -> int:
    """The most bytes gathered while any tensor is streamed."""
    source = weight_source(model, bucket_bytes=BUCKET_BYTES)
    gather, gathered = source.gathered, [0]

    @contextmanager
    def counted(slots: Any) -> Iterator[list[torch.Tensor]]:
        with gather(slots) as tensors:
            storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
            gathered.append(sum(t.untyped_storage().nbytes() for t in storages.values()))
            yield tensors

    source.gathered = counted  # type: ignore[method-assign]
    with torch.inference_mode():  # as a consumer may be; the trainer goes on training afterwards
        for _ in source:
            pass
    return max(gathered)


def failures(folder: Path, wrap: Wrap) -> dict[str, Any]:
    """The engine of the last rank fails at several points: all raise, the next sync is whole."""
    model = wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    raised = {}
    for takes in (0, 1, 9, 21, 1000):
        failing = FailingEngine(takes) if RANK == RANKS - 1 else None
        try:
            RolloutHook(failing, model, bucket_bytes=BUCKET_BYTES).sync()
        except WeightUpdateError as error:
            raised[takes] = str(error)
    generator = engine_of(folder) if RANK == 0 else None
    RolloutHook(generator, model, bucket_bytes=BUCKET_BYTES).sync()
    expected = logprobs_of(model)
    return {"raised": raised, "gap": 0.0 if generator is None else gap(generator, expected)}


def tensor_parallel(folder: Path, wrap: Wrap, *, lora: bool = False) -> dict[str, Any]:
    """One engine on all ranks, which are the trainer's: what it has after a sync, and what that
    took, beside whole tensors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        model = with_lora(model)
    model = wrap(model)
    return slices_of(folder, model, "bfloat16", bucket_bytes=BUCKET_BYTES)


def exchanges() -> bool:
    """Whether every rank gets what it needs, of tensors held and needed at random."""
    same = True
    group = distributed.new_group(list(range(RANKS)))
    for seed in range(30):
        rng = random.Random(seed)
        shapes = [tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3))) for _ in range(4)]
        dtypes = [rng.choice([torch.float32, torch.bfloat16]) for _ in shapes]
        manifest = {
            str(i): TensorSpec(*each) for i, each in enumerate(zip(shapes, dtypes, strict=True))
        }
        whole = {
            name: torch.arange(spec.num_bytes // spec.dtype.itemsize, dtype=spec.dtype) + int(name)
            for name, spec in manifest.items()
        }
        needed = [random_slices(rng, manifest) for _ in range(RANKS)]
        shards = {}
        for name, flat in whole.items():
            ends = sorted(rng.randint(0, len(flat)) for _ in range(RANKS - 1))
            held = [range(a, b) for a, b in itertools.pairwise([0, *ends, len(flat)])]
            own = held[RANK]
            shards[name] = FlatShard(flat[own.start : own.stop].float(), held)
        exchange = ShardExchange(group, torch.device("cpu"), manifest, needed)
        pieces = exchange.run(shards)
        same &= pieces.keys() == needed[RANK].keys()
        for name, where in needed[RANK].items():
            value = whole[name].view(manifest[name].shape)
            wanted = value if where is None else where.of(value)
            same &= torch.equal(exchange.needed_slice(name, pieces[name]), wanted)
    return same


def random_slices(rng: random.Random, manifest: Manifest) -> Slices:
    """Of some of the tensors, what a rank may need."""
    found: dict[str, TensorSlice | None] = {}
    for name, spec in manifest.items():
        kind = rng.random()
        if kind < 0.2:
            continue
        found[name] = None
        if kind > 0.4:
            dim = rng.randrange(len(spec.shape))
            ends = sorted(rng.randint(0, spec.shape[dim]) for _ in range(4))
            found[name] = TensorSlice(dim, (range(*ends[:2]), range(*ends[2:])))
    return found


def fails_on_one_rank(folder: Path, wrap: Wrap) -> dict[str, Any]:
    """The engine's last rank refuses what comes: no rank has written anything, none waits."""
    model = wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    engine = tensor_parallel_engine(folder, "float32")
    before = engine.weights_digest()
    options = {"selector": "nobody"} if RANK == RANKS - 1 else {}
    raised = ""
    try:
        RolloutHook(engine, model, **options).sync()
    except RolloutError as error:
        raised = str(error)
    return {"raised": raised, "serves": engine.can_run, "same": engine.weights_digest() == before}


def mixed_precision(folder: Path) -> dict[str, Any]:
    """Computing in bfloat16, the masters are streamed; after a forward alone as well."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model = fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    logprobs_of(model)  # leaves the outermost unit unsharded
    given = {name: tensor.clone() for name, tensor in weight_source(model)}
    halves = {name: tensor.clone() for name, tensor in weight_source(model, dtype="bfloat16")}
    return {
        "masters": hash_of(given) == hash_of(whole),
        "halves": hash_of(halves) == hash_of({n: t.bfloat16() for n, t in whole.items()}),
    }


def after_a_forward(folder: Path) -> dict[str, Any]:
    """The first sync follows a forward without a backward, which leaves the only unit unsharded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = fully_shard(model)
    generator = engine_of(folder) if RANK == 0 else None
    hook = RolloutHook(generator, model, bucket_bytes=BUCKET_BYTES)
    with torch.no_grad():
        expected = logprobs_of(model)
    sync = hook.sync()
    return {
        "num_tensors": sync.num_tensors,
        "gap": 0.0 if generator is None else gap(generator, expected),
    }


def main(output: str) -> None:
    wraps: dict[str, Wrap] = {
        "fsdp2": fsdp2,
        "fsdp1": lambda model: fsdp1(model, use_orig_params=True),
        "fsdp1-flat": lambda model: fsdp1(model, use_orig_params=False),
        "ddp": DistributedDataParallel,
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        # Before there is a group, in which transformers writes on one rank alone.
        families = save_tiny_trainers(Path(temporary) / "families")
        distributed.init_process_group("gloo")
        untied = save_tiny_llama(Path(temporary) / "untied", sharpness=1.0)
        tied = save_tiny_llama(Path(temporary) / "tied", tied=True)
        for name, wrap in wraps.items():
            results[name] = follows_the_trainer(untied, wrap)
            results[f"{name}-tied"] = follows_the_trainer(tied, wrap)
            results[f"{name}-failures"] = failures(untied, wrap)
            if name != "fsdp1-flat":  # one flat parameter cannot be trained in part
                results[f"{name}-lora"] = follows_the_trainer(untied, wrap, lora=True)
        experts = save_tiny_moe(Path(temporary) / "experts", sharpness=1.0)
        results["fsdp2-experts"] = follows_the_trainer(experts, fsdp2)
        for name, folder in families.items():
            targets = LORA_TARGETS[name]
            results[f"fsdp2-{name}"] = follows_the_trainer(folder, fsdp2)
            results[f"fsdp2-{name}-lora"] = follows_the_trainer(
                folder, fsdp2, lora=True, target_modules=targets
            )
            results[f"tensor-fsdp2-{name}"] = tensor_parallel(folder, fsdp2)
        results["mixed"] = mixed_precision(untied)
        results["after a forward"] = after_a_forward(untied)
        one_kv_head = save_tiny_llama(Path(temporary) / "one", num_kv_heads=1)
        for name, folder in {"": untied, "-tied": tied, "-one": one_kv_head}.items():
            results[f"tensor-fsdp2{name}"] = tensor_parallel(folder, fsdp2)
        results["tensor-fsdp2-experts"] = tensor_parallel(experts, fsdp2)
        results["tensor-fsdp2-lora"] = tensor_parallel(untied, fsdp2, lora=True)
        results["tensor-fsdp1"] = tensor_parallel(untied, wraps["fsdp1"])
        results["tensor-fails"] = fails_on_one_rank(untied, fsdp2)
        results["exchanges"] = exchanges()
    Path(output).write_text(json.dumps(results))
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
