"""Requests with seeds of their own, drawn from a small set so that references are computed once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from rollout import SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and how it is sampled; ``number`` tells it from others."""

    number: int
    prompt: tuple[int, ...] = field(compare=False)
    sampling: dict[str, Any] = field(compare=False)  # names that /generate and the engine share

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.sampling)

    @property
    def is_resumable(self) -> bool:
        """Prompt and partial output can be sent as a prompt: nothing counts output apart."""
        plain = {"temperature", "top_p", "top_k", "ignore_eos", "max_new_tokens", "seed"}
        return set(self.sampling) <= plain

    @property
    def is_plain(self) -> bool:
        """Its logprobs are the model's own at temperature 1."""
        return self.sampling["temperature"] == 1.0 and self.is_resumable


def draw_asks(seed: int, count: int, vocab_size: int, max_new_tokens: int) -> list[Ask]:
    """Some share a prefix, some are long, some have penalties, stops or truncation."""
    rng = random.Random(f"asks {seed}")
    prefixes = [[rng.randrange(3, vocab_size) for _ in range(20)] for _ in range(4)]
    asks = []
    for number in range(count):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 12))]
        if number % 2:
            prompt = rng.choice(prefixes)[: rng.randint(1, 20)] + prompt
        sampling: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.7, 1.0, 1.0]),
            "max_new_tokens": rng.randint(1, max_new_tokens),
            "ignore_eos": rng.random() < 0.7,
            "seed": number,
        }
        option = rng.randrange(8)
        if option == 0:
            sampling |= {"top_p": 0.8, "top_k": 20}
        elif option == 1:
            sampling |= {"min_p": 0.05, "repetition_penalty": 1.2}
        elif option == 2:
            sampling |= {"presence_penalty": 0.5, "frequency_penalty": 0.3}
        elif option == 3:
            stops = [rng.randrange(3, vocab_size) for _ in range(3)]
            sampling |= {"stop_token_ids": stops, "min_new_tokens": 1}
        asks.append(Ask(number, tuple(prompt), sampling))
    return asks
