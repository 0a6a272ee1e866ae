"""Question: what do a forward and a training step cost where the trainer computes the engine's
logprobs (`exact_forward`)? Bars: 1.3 times the ordinary model's forward, 1.25 times its step.

    python benchmarks/bench_exact.py [--threads 2] [--dtypes float32 bfloat16] [--json FILE]

A step is logprobs, backward and AdamW, over sequences of mixed lengths, padded on the right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
from harness.command import Command, parts_of
from harness.rows import Row, row
from harness.timing import in_turns, paired
from transformers import AutoModelForCausalLM

from rollout.trainers.exact import exact_forward, token_logprobs

FORWARD_BAR, STEP_BAR = 1.3, 1.25


class Trainer:
    """A model, ordinary or exact, and its optimizer."""

    def __init__(self, options: argparse.Namespace, dtype: str, contexts: ExitStack | None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self._is_exact = contexts is not None
        generator = torch.Generator().manual_seed(0)
        shape = options.sequences, options.tokens
        self._ids_BT = torch.randint(3, self.model.config.vocab_size, shape, generator=generator)
        lens_B = torch.linspace(options.tokens / 4, options.tokens, options.sequences).int()
        self._mask_BT = torch.arange(options.tokens) < lens_B[:, None]
        if contexts is not None:
            contexts.enter_context(exact_forward(self.model))

    def logprobs(self) -> torch.Tensor:
        out = self.model(input_ids=self._ids_BT, attention_mask=self._mask_BT, use_cache=False)
        next_BT = self._ids_BT.roll(-1, dims=1)
        if self._is_exact:
            return token_logprobs(out.logits, next_BT)
        return out.logits.float().log_softmax(-1).gather(-1, next_BT[..., None])[..., 0]

    def forward(self) -> None:
        with torch.no_grad():
            self.logprobs()

    def step(self) -> None:
        (self.logprobs() * self._mask_BT).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def exact_rows(options: argparse.Namespace) -> Iterator[Row]:
    for dtype in options.dtypes:
        with ExitStack() as contexts:
            sides = {
                name: Trainer(options, dtype, given)
                for name, given in {"ordinary": None, "exact": contexts}.items()
            }
            for what, bar in {"forward": FORWARD_BAR, "step": STEP_BAR}.items():
                calls = {name: partial(getattr(side, what)) for name, side in sides.items()}
                seconds = in_turns(calls, options.repeats)
                ratio = paired(seconds["exact"], seconds["ordinary"])
                for name, each in seconds.items():
                    yield row(f"{dtype} {what}, {name}", min(each), "s")
                yield row(f"{dtype} {what}, exact / ordinary", ratio, "ratio", bar, at_most=True)


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(2)
    command.option("--dtypes", ["float32", "bfloat16"], nargs="+", help="of the model")
    command.option("--sequences", 16, quick=2, help="of a batch")
    command.option("--tokens", 256, quick=16, help="of the longest")
    command.option("--repeats", 7, quick=1, help="that ratios are medians of")
    return command


if __name__ == "__main__":
    make_command().run("exact training, {threads} threads", parts_of({"exact": exact_rows}))
