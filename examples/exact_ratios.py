"""Probabilities of a trainer over those of a rollout, ordinary and exact: numbers, and a picture.

python examples/exact_ratios.py [MODEL_FOLDER] [--dtype bfloat16] [--output ratios.png]
"""

import argparse
from contextlib import nullcontext

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.trainers.exact import exact_forward, token_logprobs

PROMPTS = [
    "What is 3 + 4?", "Tell me a story about a fox.", "Write a haiku.", "Name five rivers.",
    "Explain gravity to a child.", "What is 12 * 7?", "Sort a list in Python.", "Who wrote Hamlet?",
]  # fmt: skip


def ratios_of(model: torch.nn.Module, rollouts: list[Rollout]) -> torch.Tensor:
    """The ratio at each sampled token of all rollouts."""
    found = []
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        logprobs = token_logprobs(logits[0, :-1], ids[0, 1:])[-len(rollout.token_ids) :]
        found.append((logprobs - torch.tensor(rollout.logprobs)).exp())
    return torch.cat(found)


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="models/SmolLM2-135M-Instruct")
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--output", default="ratios.png")
options = parser.parse_args()

engine = RolloutEngine.from_pretrained(options.model, dtype=options.dtype)
chats = [[{"role": "user", "content": text}] for text in PROMPTS]
rollouts = [
    rollout
    for length in (24, 96)
    for rollout in engine.generate(chats, SamplingParams(max_new_tokens=length, n=4, seed=length))
]
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
figure, axes = plt.subplots(figsize=(7, 2.6), dpi=110)
for name, context, color in (
    ("ordinary forward", nullcontext(), "#888888"),
    ("exact_forward", exact_forward(model), "#cc3333"),
):
    with context:
        ratios = ratios_of(model, rollouts)
    print(f"{name}: {len(ratios)} tokens, {ratios.min():.4f} to {ratios.max():.4f}")
    axes.hist(ratios.clamp(0.7, 1.3), bins=61, range=(0.695, 1.305), label=name, color=color)
axes.set(xlabel="trainer / rollout", ylabel="tokens", yscale="log")
axes.legend(frameon=False)
figure.tight_layout()
figure.savefig(options.output)
