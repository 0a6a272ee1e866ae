"""EAGLE, EAGLE-3 and DFlash as their papers describe them: one sequence, dense attention, torch.

Shares no code with what it checks: names, norms, rotation and masks are spelled out here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class PlainLayer:
    """A Llama decoder layer's two halves, by the names of its tensors."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], at: str, config: Mapping[str, float]
    ) -> None:
        self.tensors = tensors
        self.at = at
        self.config = config

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.tensors[f"{self.at}.{name}.weight"].T
        bias = self.tensors.get(f"{self.at}.{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.tensors[f"{self.at}.{name}.weight"], self.config["rms_norm_eps"])

    def attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size, rows = self.config["head_dim"], len(x)
        q = self.linear("self_attn.q_proj", x).view(rows, heads, size)
        k = self.linear("self_attn.k_proj", x).view(rows, kv_heads, size)
        v = self.linear("self_attn.v_proj", x).view(rows, kv_heads, size)
        if f"{self.at}.self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        mixed = []
        for head in range(heads):
            group = head * kv_heads // heads
            scores = q[:, head] @ k[:, group].T / size**0.5
            hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=1)
            mixed.append(weights @ v[:, group])
        return self.linear("self_attn.o_proj", torch.cat(mixed, dim=1))

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Dimension pairs (i, i + half) as complex numbers, turned by position * frequency."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        angles = positions[:, None, None].double() * frequencies
        turned = torch.complex(x[..., :half].double(), x[..., half:].double())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.linear("mlp.gate_proj", x)
        return self.linear("mlp.down_proj", gate * gate.sigmoid() * self.linear("mlp.up_proj", x))


class PlainEagle3:
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, float],
        embedding: torch.Tensor,
        options: Mapping[str, object],
    ) -> None:
        """``config``: of the layer. ``embedding``: the target's, where the draft has none."""
        at = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
        self.layer = PlainLayer(tensors, at, config)
        self.tensors = tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.eps = config["rms_norm_eps"]
        self.options = options

    def fuse(self, features: list[torch.Tensor]) -> torch.Tensor:
        """``features``: one [T, E] for each layer of the target that is read."""
        if self.options.get("fc_norm"):
            features = [
                rms(each, self.tensors[f"fc_norm.{index}.weight"], self.eps)
                for index, each in enumerate(features)
            ]
        joined = torch.cat(features, dim=1)
        if self.options.get("norm_before_fc"):
            joined = rms(joined, self.tensors["input_norm.weight"], self.eps)
        return joined @ self.tensors["fc.weight"].T

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        normed = self.layer.norm("hidden_norm", hidden)
        embedded = self.layer.norm("input_layernorm", self.embedding[tokens])
        residual = normed if self.options.get("norm_before_residual") else hidden
        joined = torch.cat([embedded, normed], dim=1)
        middle = residual + self.layer.attention(joined, positions)
        out = middle + self.layer.mlp(self.layer.norm("post_attention_layernorm", middle))
        return self.normed(out) if self.options.get("norm_output") else out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the draft's tokens in the checkpoint's order."""
        normed = hidden if self.options.get("norm_output") else self.normed(hidden)
        return normed @ self.tensors["lm_head.weight"].T

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.tensors["norm.weight"], self.eps)


class PlainEagle1:
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, float],
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        renamed = {
            name.replace("fusion_fc.", "fc.").replace("transformer.", "layers.0."): tensor
            for name, tensor in tensors.items()
        }
        self.layer = PlainLayer(renamed, "layers.0", config)
        self.fc, self.fc_bias = renamed["fc.weight"], renamed.get("fc.bias", 0)
        self.embedding = renamed.get("embed_tokens.weight", embedding)
        self.head = head

    def fuse(self, features: list[torch.Tensor]) -> torch.Tensor:
        (final,) = features
        return final

    def forward(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        fused = torch.cat([self.embedding[tokens], hidden], dim=1) @ self.fc.T + self.fc_bias
        middle = fused + self.layer.attention(fused, positions)
        return middle + self.layer.mlp(self.layer.norm("post_attention_layernorm", middle))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


class PlainDFlash:
    """A block's rows see the whole context and each other (Chen et al. 2026)."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, float],
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self.layers = [
            PlainLayer(tensors, f"layers.{index}", config)
            for index in range(int(config["num_hidden_layers"]))
        ]
        self.tensors, self.config, self.embedding = tensors, config, embedding
        self.head = tensors.get("lm_head.weight", head)

    def logits(self, features: list[torch.Tensor], block: torch.Tensor) -> torch.Tensor:
        """Logits of all rows of a block behind the context that the features are of."""
        eps, fused = self.config["rms_norm_eps"], torch.cat(features, dim=1)
        context = rms(fused @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"], eps)
        positions = torch.arange(len(context) + len(block))
        x = self.embedding[block]
        for layer in self.layers:
            rows = torch.cat([context, layer.norm("input_layernorm", x)])
            x = x + self.attention(layer, rows, positions, len(block))
            x = x + layer.mlp(layer.norm("post_attention_layernorm", x))
        return rms(x, self.tensors["norm.weight"], eps) @ self.head.T

    def attention(
        self, layer: PlainLayer, rows: torch.Tensor, positions: torch.Tensor, block: int
    ) -> torch.Tensor:
        config, size = self.config, self.config["head_dim"]
        q, k, v = (
            layer.linear(f"self_attn.{name}_proj", rows).unflatten(1, (-1, size)) for name in "qkv"
        )
        q = layer.rotated(layer.norm("self_attn.q_norm", q), positions)[-block:]
        k = layer.rotated(layer.norm("self_attn.k_norm", k), positions)
        mixed = []
        for head in range(config["num_attention_heads"]):
            group = head * config["num_key_value_heads"] // config["num_attention_heads"]
            weights = (q[:, head] @ k[:, group].T / size**0.5).softmax(dim=1)
            mixed.append(weights @ v[:, group])
        return layer.linear("self_attn.o_proj", torch.cat(mixed, dim=1))


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight
