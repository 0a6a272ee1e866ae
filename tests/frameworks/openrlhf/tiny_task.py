"""A task small enough for a test: a random model, a byte tokenizer, prompts and a reward."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REWARD = '''
"""The share of a response's characters that are vowels. What was asked is kept in QUERIES."""

import json
import os

import torch


def reward_func(queries, prompts, labels, **kwargs):
    shares = [
        sum(c in "aeiou" for c in query[len(prompt):]) / max(1, len(query) - len(prompt))
        for query, prompt in zip(queries, prompts, strict=True)
    ]
    with open(os.environ["QUERIES"], "a") as file:
        file.write("".join(json.dumps(query) + "\\n" for query in queries))
    rewards = torch.tensor(shares)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"vowels": rewards}}
'''

AGENT = '''
"""Two turns: the environment answers once, then the trajectory is done."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Environment(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        return {
            "rewards": torch.tensor(float(len(states["action_text"]) % 3)),
            "environment_feedback": " go on:",
            "done": self.turns == 2,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Environment)
'''


def write_task(folder: Path, *, num_prompts: int = 16) -> Path:
    """``model/``, ``prompts.jsonl``, ``reward.py`` and ``agent.py`` in the folder."""
    model = folder / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=vocabulary["<pad>"],
        eos_token_id=vocabulary["<eos>"],
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    rows = [{"prompt": f"say {index}:", "label": str(index)} for index in range(num_prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    return folder
