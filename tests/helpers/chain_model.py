"""A model that writes given texts: it continues every word by the one that follows it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.text_model import save_word_tokenizer
from tests.helpers.tiny_model import save_tiny_llama

_SPECIAL = ("<pad>", "<unk>", "</s>")  # tiny models end with the token 2


def save_chain_model(
    folder: Path,
    chains: Sequence[str],
    *,
    others: Sequence[str] = (),
    special: Sequence[str] = (),
    chat_template: str,
) -> Path:
    """A Llama whose most likely token is the next word of a chain, and after its last one the end.

    Args:
        chains: texts of words with single spaces; a word is followed by the same one everywhere.
        others: words that it reads.
        special: those of the words that are special tokens.
    """
    following = _following(chains)
    words = list(dict.fromkeys([*_SPECIAL, *others, *following, *following.values()]))
    save_tiny_llama(folder, vocab_size=len(words), num_layers=1)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()  # hidden states are the last word's embedding
    embeddings = tensors["model.embed_tokens.weight"]
    head = torch.zeros_like(tensors["lm_head.weight"])
    for word, next_word in following.items():
        head[words.index(next_word)] += embeddings[words.index(word)]
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    save_word_tokenizer(folder, words, special=[*_SPECIAL, *special], chat_template=chat_template)
    return folder


def _following(chains: Sequence[str]) -> Mapping[str, str]:
    following: dict[str, str] = {}
    for chain in chains:
        words = [*chain.split(" "), "</s>"]
        for word, next_word in pairwise(words):
            assert following.setdefault(word, next_word) == next_word, word
    return following
