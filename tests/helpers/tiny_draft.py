"""Random EAGLE drafts of a tiny target, written as the checkpoints people publish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.helpers.tiny_model import write_checkpoint


def save_tiny_eagle3(
    folder: Path,
    target_folder: Path,
    *,
    layout: str = "specforge",
    layers: Sequence[int] = (0, 1, 2),
    draft_vocab_size: int | None = None,
    unsorted: bool = False,
    absolute: bool = False,
    bias: bool = False,
    hidden_size: int | None = None,
    options: dict[str, object] | None = None,
    seed: int = 0,
    **sizes: int,
) -> Path:
    """An EAGLE-3 draft that reads the streams entering ``layers`` of the target.

    ``draft_vocab_size``: default: the target's. ``unsorted``: the vocabulary is in random order.
    ``absolute``: d2t holds the target's tokens, not differences. ``options``: further fields of
    config.json, with the tensors they want (norm_before_fc, fc_norm). A ``hidden_size`` other than
    the target's brings an embedding of its own. ``sizes``: of the `_Layer`.
    """
    options = dict(options or {})
    target = json.loads((target_folder / "config.json").read_text())
    vocab_size, width = target["vocab_size"], target["hidden_size"]
    hidden = hidden_size or width
    draft_vocab_size = draft_vocab_size or vocab_size
    random, layer = _Random(seed), _Layer(**sizes)
    qk_norm = bool(options.pop("qk_norm", False))
    tensors = {
        "fc.weight": random(hidden, len(layers) * width),
        **layer.tensors(random, "midlayer", 2 * hidden, hidden, bias=bias, qk_norm=qk_norm),
        "midlayer.input_layernorm.weight": random.norm(hidden),
        "midlayer.hidden_norm.weight": random.norm(hidden),
        "norm.weight": random.norm(hidden),
        "lm_head.weight": random(draft_vocab_size, hidden, scale=4.0),
    }
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(len(layers) * width)
    if options.get("fc_norm"):
        for index in range(len(layers)):
            tensors[f"fc_norm.{index}.weight"] = random.norm(width)
    if hidden != width:
        tensors["embed_tokens.weight"] = random(vocab_size, hidden, scale=hidden**0.5)
        options["target_hidden_size"] = width
    if draft_vocab_size != vocab_size:
        tensors |= _vocabulary(random, draft_vocab_size, vocab_size, unsorted, absolute)

    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): it for name, it in tensors.items()}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer.config(vocab_size, hidden),
            "draft_vocab_size": draft_vocab_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(layers),
        }
    else:
        config = {
            **layer.config(vocab_size, hidden),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab_size,
        }
        if layout == "specforge":
            left = [entered - 1 for entered in layers]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": left}
    return write_checkpoint(folder, config | options, tensors)


def save_tiny_dflash(
    folder: Path,
    target_folder: Path,
    *,
    layout: str = "dflash",
    layers: Sequence[int] = (1, 2),
    num_layers: int = 2,
    block_size: int = 5,
    draft_vocab_size: int | None = None,
    bias: bool = False,
    seed: int = 0,
    options: dict[str, object] | None = None,
    **sizes: int,
) -> Path:
    """A DFlash draft that reads the streams entering ``layers`` of the target.

    ``draft_vocab_size``: a head and vocabulary of its own, which speculators write. ``options``:
    further fields of config.json. ``sizes``: of the `_Layer`.
    """
    target = json.loads((target_folder / "config.json").read_text())
    vocab_size, hidden = target["vocab_size"], target["hidden_size"]
    random, layer = _Random(seed), _Layer(**sizes)
    tensors = {
        "fc.weight": random(hidden, len(layers) * hidden),
        "hidden_norm.weight": random.norm(hidden),
        "norm.weight": random.norm(hidden),
    }
    for index in range(num_layers):
        at = f"layers.{index}"
        tensors |= layer.tensors(random, at, hidden, hidden, bias=bias, qk_norm=True)
        tensors[f"{at}.input_layernorm.weight"] = random.norm(hidden)
    if draft_vocab_size:
        tensors["lm_head.weight"] = random(draft_vocab_size, hidden, scale=4.0)
        tensors |= _vocabulary(random, draft_vocab_size, vocab_size, True, False)
    decoder = layer.config(vocab_size, hidden) | {"num_hidden_layers": num_layers}
    if layout == "speculators":
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": decoder,
            "aux_hidden_state_layer_ids": list(layers),
            "mask_token_id": vocab_size - 1,
        }
        tensors["verifier_norm.weight"] = random.norm(hidden)
    else:
        left = [entered - 1 for entered in layers]
        own = {"target_layer_ids": left, "mask_token_id": vocab_size - 1}
        config = decoder | {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    if draft_vocab_size:
        config["draft_vocab_size"] = draft_vocab_size
    return write_checkpoint(folder, config | {"block_size": block_size} | (options or {}), tensors)


def save_tiny_eagle1(
    folder: Path,
    target_folder: Path,
    *,
    layout: str = "eagle",
    bias: bool = True,
    own_embedding: bool = False,
    options: dict[str, object] | None = None,
    **sizes: int,
) -> Path:
    """An EAGLE or EAGLE-2 draft. In the authors' layout it brings an embedding: a copy of the
    target's, or with ``own_embedding`` another one. ``bias``: of fc. ``sizes``: of the `_Layer`."""
    target = json.loads((target_folder / "config.json").read_text())
    vocab_size, hidden = target["vocab_size"], target["hidden_size"]
    random, layer = _Random(0), _Layer(**sizes)
    tensors = {
        "fc.weight": random(hidden, 2 * hidden),
        **layer.tensors(random, "layers.0", hidden, hidden),
    }
    if bias:
        tensors["fc.bias"] = random(hidden)
    if own_embedding:
        tensors["embed_tokens.weight"] = random(vocab_size, hidden, scale=hidden**0.5)
    elif layout == "eagle":
        theirs = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
        tensors["embed_tokens.weight"] = theirs.float()
    layer_config = layer.config(vocab_size, hidden)
    config = {**layer_config, "architectures": ["LlamaForCausalLM"]}
    if layout == "speculators":
        tensors = {
            name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): it
            for name, it in tensors.items()
        }
        config = {
            "architectures": ["EagleSpeculator"],
            "speculators_model_type": "eagle",
            "transformer_layer_config": layer_config,
            "fusion_bias": bias,
            "layernorms": False,
        }
    return write_checkpoint(folder, config | (options or {}), tensors)


class _Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * scale / shape[-1] ** 0.5

    def norm(self, width: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=self.generator)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Sizes of a draft's decoder layer."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 56

    def tensors(
        self,
        random: _Random,
        at: str,
        inputs: int,
        hidden: int,
        *,
        bias: bool = False,
        qk_norm: bool = False,
    ) -> dict[str, torch.Tensor]:
        shapes = {
            "self_attn.q_proj": (self.num_heads * self.head_dim, inputs),
            "self_attn.k_proj": (self.num_kv_heads * self.head_dim, inputs),
            "self_attn.v_proj": (self.num_kv_heads * self.head_dim, inputs),
            "self_attn.o_proj": (hidden, self.num_heads * self.head_dim),
            "mlp.gate_proj": (self.intermediate_size, hidden),
            "mlp.up_proj": (self.intermediate_size, hidden),
            "mlp.down_proj": (hidden, self.intermediate_size),
        }
        tensors = {f"{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        if bias:
            tensors |= {f"{at}.{name}.bias": random(shape[0]) for name, shape in shapes.items()}
        if qk_norm:
            tensors[f"{at}.self_attn.q_norm.weight"] = random.norm(self.head_dim)
            tensors[f"{at}.self_attn.k_norm.weight"] = random.norm(self.head_dim)
        tensors[f"{at}.post_attention_layernorm.weight"] = random.norm(hidden)
        return tensors

    def config(self, vocab_size: int, hidden: int) -> dict[str, object]:
        return {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": 64,  # fewer than the target's, as published drafts have
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }


def _vocabulary(
    random: _Random, draft_vocab_size: int, vocab_size: int, unsorted: bool, absolute: bool
) -> dict[str, torch.Tensor]:
    tokens = torch.randperm(vocab_size, generator=random.generator)[:draft_vocab_size]
    if not unsorted:
        tokens = tokens.sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[tokens] = True
    return {"d2t": tokens if absolute else tokens - torch.arange(draft_vocab_size), "t2d": t2d}


def save_copying_eagle1(folder: Path, target_folder: Path) -> Path:
    """An EAGLE draft of a one-layer target that guesses nearly as the target samples.

    Its layer is the target's, over the embeddings alone: all that it misses is the first token of
    the sequence, and the norms that EAGLE drafts do not have.
    """
    theirs = load_file(target_folder / "model.safetensors")
    config = json.loads((target_folder / "config.json").read_text())
    hidden = config["hidden_size"]
    embedding_only = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    at = "model.layers.0."
    layer = {
        name.removeprefix("model."): it
        for name, it in theirs.items()
        if name.startswith(at) and not name.endswith("input_layernorm.weight")
    }
    layer["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    layer["fc.weight"] = embedding_only.to(theirs["model.norm.weight"].dtype)
    return write_checkpoint(folder, config, layer)
