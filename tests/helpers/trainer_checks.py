"""Checks for the weights of every trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout import RolloutEngine
from rollout.errors import WeightUpdateError

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


def loss_of(model: nn.Module, rank: int = 0) -> torch.Tensor:
    """The loss of a batch that differs from rank to rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(3, 97, (2, 12), generator=generator)
    return model(input_ids=ids, labels=ids).loss


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    """Adapters of random values, the same each time."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    defaults = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 8}
    return get_peft_model(model, LoraConfig(**defaults | {"init_lora_weights": False} | options))


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
