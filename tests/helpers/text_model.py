"""Tiny random models that read and write text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.helpers.tiny_model import save_tiny_llama

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def save_text_model(folder: Path, *, max_positions: int = 128) -> Path:
    """`save_tiny_llama` with a tokenizer of one token per word, and a chat template."""
    save_tiny_llama(folder, max_positions=max_positions)
    special = ["<pad>", "<unk>", "</s>", "<system>", "<user>", "<assistant>"]
    tokens = [*special, *WORDS]
    tokens += [f"word{index}" for index in range(97 - len(tokens))]
    save_word_tokenizer(folder, tokens, chat_template=CHAT_TEMPLATE)
    return folder


def save_word_tokenizer(
    folder: Path, words: Sequence[str], *, special: Sequence[str] = (), chat_template: str
) -> None:
    """A tokenizer of one token per word, ``<pad>``, ``<unk>`` and ``</s>`` among them.

    ``special``: the words that are special tokens.
    """
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": words.index(word), "content": word, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for word in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(words)},
            "unk_token": "<unk>",
        },
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": chat_template,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def byte_tokenizer() -> Tokenizer:
    """Byte-level, of one token per byte after two special ones."""
    names = ["<pad>", "</s>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def save_byte_model(folder: Path, *, max_positions: int = 128) -> Path:
    """`save_tiny_llama` with a byte-level tokenizer of one token per byte: what it writes is full
    of characters in pieces, and of pieces of none."""
    tokenizer = byte_tokenizer()
    save_tiny_llama(folder, vocab_size=tokenizer.get_vocab_size(), max_positions=max_positions)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
