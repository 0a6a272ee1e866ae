"""Other weights for the tests' text model, and what it says with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save

from rollout import RolloutEngine, SamplingParams
from tests.helpers.tiny_model import save_tiny_llama

PROMPT = [5, 9, 11, 3, 70]
SAMPLING = {"temperature": 0.9, "max_new_tokens": 12, "ignore_eos": True}
SEED = 4


@dataclass(frozen=True)
class Policy:
    folder: Path
    tensors: Mapping[str, torch.Tensor]
    output_ids: list[int]
    digest: str

    @property
    def safetensors(self) -> bytes:
        return save(dict(self.tensors))

    @property
    def halves(self) -> list[dict[str, torch.Tensor]]:
        return [self.half(last=False), self.half(last=True)]

    def half(self, *, last: bool) -> dict[str, torch.Tensor]:
        """One half of the tensors, or the other."""
        names = sorted(self.tensors)
        half = names[len(names) // 2 :] if last else names[: len(names) // 2]
        return {name: self.tensors[name] for name in half}


def policy(folder: Path, seed: int) -> Policy:
    save_tiny_llama(folder, max_positions=512, seed=seed)
    return read_policy(folder)


def read_policy(folder: Path) -> Policy:
    engine = RolloutEngine.from_pretrained(folder, spec="none", num_threads=1)
    (rollout,) = engine.generate([PROMPT], SamplingParams(**SAMPLING, seed=SEED))
    tensors = load_file(folder / "model.safetensors")
    return Policy(folder, tensors, rollout.token_ids, engine.weights_digest())


def ok(answer: httpx.Response) -> dict[str, Any]:
    """The body of a call on weights, corpora or memory that did what it was asked."""
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
    return answer.json()


def generate(client: httpx.Client, **sampling: Any) -> httpx.Response:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"seed": SEED} | sampling}
    return client.post("/generate", json=body)


def output_ids(client: httpx.Client) -> list[int]:
    answer = generate(client)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def announced(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The fields by which trainers announce the tensors they will broadcast."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
