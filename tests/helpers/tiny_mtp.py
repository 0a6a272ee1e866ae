"""Random MTP chains in the layouts checkpoints have, and a plain chain to compare with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.helpers.plain_eagle import PlainLayer, rms
from tests.helpers.tiny_model import save_tiny_llama, write_checkpoint

E, FFN, VOCAB, LAYERS, HEADS, KV_HEADS, D = 48, 80, 97, 2, 6, 2, 8
EPS, THETA = 1e-5, 10000.0

# Per layout: the step's own five tensors and the prefix of its decoder layer.
NAMES = {
    "mimo": (
        "model.mtp_layers.{k}.token_layernorm", "model.mtp_layers.{k}.hidden_layernorm",
        "model.mtp_layers.{k}.input_proj", "model.mtp_layers.{k}.final_layernorm",
        "model.mtp_layers.{k}",
    ),
    "qwen3_next": (
        "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
        "mtp.layers.{k}",
    ),
    "deepseek_v3": (
        "model.layers.{n}.enorm", "model.layers.{n}.hnorm", "model.layers.{n}.eh_proj",
        "model.layers.{n}.shared_head.norm", "model.layers.{n}",
    ),
}  # fmt: skip


def names_of(layout: str, step: int) -> list[str]:
    return [name.format(k=step, n=LAYERS + step) for name in NAMES[layout]]


def chain_tensors(
    layout: str,
    steps: int,
    *,
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, D),
    likely: bool = False,
    seed: int = 9,
) -> dict[str, torch.Tensor]:
    """A chain's tensors, random; norms differ from one. ``likely``: see `save_tiny_mtp`."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        values = torch.randn(shape, generator=generator)
        values = values / shape[-1] ** 0.5 if len(shape) == 2 else 1 + 0.2 * values
        tensors.setdefault(f"{name}.weight", values)

    for step in range(steps):
        embedding_norm, hidden_norm, projection, final_norm, decoder = names_of(layout, step)
        for norm in (
            embedding_norm, hidden_norm, final_norm,
            f"{decoder}.input_layernorm", f"{decoder}.post_attention_layernorm",
        ):  # fmt: skip
            add(norm, E)
        add(projection, E, 2 * E)
        add(f"{decoder}.self_attn.q_proj", num_heads * head_dim, E)
        for kv in ("k_proj", "v_proj"):
            add(f"{decoder}.self_attn.{kv}", num_kv_heads * head_dim, E)
        add(f"{decoder}.self_attn.o_proj", E, num_heads * head_dim)
        for up in ("gate_proj", "up_proj"):
            add(f"{decoder}.mlp.{up}", FFN, E)
        add(f"{decoder}.mlp.down_proj", E, FFN)
        if likely:
            both = torch.cat([torch.eye(E), 0.2 * tensors[f"{projection}.weight"][:, :E]], dim=1)
            tensors[f"{projection}.weight"] = both.roll(E if layout == "mimo" else 0, dims=1)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"{decoder}.{name}.weight"] *= 0.3
    return tensors


def save_tiny_mtp(
    folder: Path,
    layout: str,
    steps: int = 2,
    *,
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, D),
    likely: bool = False,
    extra: dict[str, torch.Tensor] | None = None,
    **model: object,
) -> Path:
    """A target's folder, with its chain.

    ``heads``: query heads, kv heads, head dim of the chain. ``likely``: the token's own embedding
    is most of what comes out, as it is of the target: many guesses come true.
    """
    target = save_tiny_llama(folder / "target", **model)
    tensors = chain_tensors(layout, steps, heads=heads, likely=likely) | (extra or {})
    return add_chain(target, tensors, steps)


def add_chain(target: Path, tensors: dict[str, torch.Tensor], steps: int) -> Path:
    """Write a chain's tensors, in the target's dtype, into its folder."""
    config = json.loads((target / "config.json").read_text())
    config["num_nextn_predict_layers"] = steps
    stored = load_file(target / "model.safetensors")
    dtype = stored["model.norm.weight"].dtype
    stored |= {name: values.to(dtype) for name, values in tensors.items()}
    return write_checkpoint(target, config, stored)


def plain_step(
    tensors: dict[str, torch.Tensor], layout: str, step: int,
    embedded_LE: torch.Tensor, hidden_LE: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One step over a whole sequence, float32: [L, E], what its head reads."""
    tensors = {name: values.float() for name, values in tensors.items()}
    embedding_norm, hidden_norm, projection, final_norm, decoder = (
        f"{name}{'' if name == names_of(layout, step)[-1] else '.weight'}"
        for name in names_of(layout, step)
    )

    heads, kv_heads = (
        len(tensors[f"{decoder}.self_attn.{name}.weight"]) // D for name in ("q_proj", "k_proj")
    )
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": D}
    layer = PlainLayer(tensors, decoder, {"rms_norm_eps": EPS, "rope_theta": THETA} | sizes)
    e, h = rms(embedded_LE, tensors[embedding_norm], EPS), rms(hidden_LE, tensors[hidden_norm], EPS)
    x = torch.cat([h, e] if layout == "mimo" else [e, h], dim=-1) @ tensors[projection].T
    x = x + layer.attention(layer.norm("input_layernorm", x), torch.arange(len(x)))
    x = x + layer.mlp(layer.norm("post_attention_layernorm", x))
    return rms(x, tensors[final_norm], EPS)
