"""Checks for the weights of every trainer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout import RolloutEngine
from rollout.errors import WeightUpdateError
from rollout.trainers import RolloutHook
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.live_bytes import LiveBytes

PROMPT, OUTPUT = [5, 6, 7, 8], [9, 3, 4, 60, 12, 33, 8, 8]


def engine_of(folder: Path, dtype: str = "float32") -> RolloutEngine:
    return RolloutEngine.from_pretrained(
        str(folder), spec="none", dtype=dtype, device="cpu", max_context_len=64
    )


@torch.no_grad()
def logprobs_of(model: nn.Module) -> list[float]:
    """The logprobs of `OUTPUT` after `PROMPT` by the trainer's own forward. Called on every
    rank."""
    logits = model(input_ids=torch.tensor([PROMPT + OUTPUT])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(OUTPUT)[:, None])[:, 0].tolist()


def gap(engine: RolloutEngine, expected: list[float]) -> float:
    """The largest difference of the engine's logprobs from ``expected``."""
    scored = engine.score(PROMPT, OUTPUT)
    return max(abs(ours - theirs) for ours, theirs in zip(scored, expected, strict=True))


def weights_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """A trainer's parameters, and its routers' correction biases, which are buffers."""
    buffers = model.named_buffers()
    biases = {name: each for name, each in buffers if name.endswith("e_score_correction_bias")}
    return dict(model.named_parameters()) | biases


def loss_of(model: nn.Module, rank: int = 0) -> torch.Tensor:
    """The loss of a batch that differs from rank to rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(3, 97, (2, 12), generator=generator)
    return model(input_ids=ids, labels=ids).loss


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """Adapters of random values, the same each time."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    options = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 8} | options
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **options))


def digest_of_plain_update(folder: Path, tensors: Mapping[str, torch.Tensor], dtype: str) -> str:
    """The digest that an engine has after an update by tensors gathered another way."""
    engine = engine_of(folder, dtype)
    engine.update_weights_from_tensor(list(tensors.items()))
    return engine.weights_digest()


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        # A copy: numpy() makes a storage unresizable, and FSDP resizes its own.
        values = tensor.detach().clone().contiguous().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(values.view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()


def tensor_parallel_engine(folder: Path, dtype: str) -> RolloutEngine:
    """One engine on all ranks of the launcher."""
    parallel = {"mode": "tensor", "size": int(os.environ["WORLD_SIZE"]), "timeout": HANG_SECONDS}
    return RolloutEngine.from_pretrained(
        str(folder), spec="none", dtype=dtype, device="cpu", max_context_len=64,
        parallel=parallel,
    )  # fmt: skip


def slices_of(folder: Path, model: nn.Module, dtype: str, **options: Any) -> dict[str, Any]:
    """A sync of an engine on all ranks, beside an update with whole tensors.

    ``peak``, ``largest``: bytes that the sync allocated at once and in one piece.
    """
    engine = tensor_parallel_engine(folder, dtype)
    hook = RolloutHook(engine, model, dtype=dtype, **options)
    with LiveBytes() as live:
        sync = hook.sync()
    found = engine.weights_digest()
    with hook.source.stream() as stream:
        engine.update_weights_from_tensor((name, tensor) for name, tensor in stream)
    manifest = hook.source.manifest()
    return {
        "same": found == engine.weights_digest(),
        "num_bytes": sync.num_bytes,
        "whole_bytes": sum(spec.num_bytes for spec in manifest.values()),
        "largest_tensor": max(spec.num_bytes for spec in manifest.values()),
        "peak": live.peak,
        "largest": live.largest,
    }


def assert_follows(result: Mapping[str, Any], rank: int) -> None:
    """The trainer's weights moved and were left alone; rank 0's engine has them."""
    assert result["moved"] > 0.1
    assert result["untouched"]
    if rank == 0:
        assert result["gap"] < 1e-5
        assert result["same_digest"]


def assert_sent_in_slices(result: Mapping[str, Any], bucket_bytes: int) -> None:
    """Check a result of `slices_of`: each rank was sent its own slices, and no whole tensor."""
    assert result["same"]
    assert result["num_bytes"] < 0.6 * result["whole_bytes"]
    assert result["largest"] < result["largest_tensor"]
    assert result["peak"] <= max(bucket_bytes, result["largest_tensor"]) + 1024


class FailingEngine:
    """Takes ``takes`` tensors and then fails; all of them and then fails, where there are fewer."""

    weight_version = 3

    def __init__(self, takes: int) -> None:
        self.takes = takes

    def update_weights_from_tensor(self, named_tensors, *, weight_version=None, **options) -> None:
        if self.takes:
            for index, _ in enumerate(named_tensors, 1):
                if index == self.takes:
                    break
        raise WeightUpdateError("this engine fails on purpose")
