"""A Llama decoder layer that can be trained, in the pieces a draft's passes need.

Parameters carry the names checkpoints have for them in a layer.

Legend: R rows, I attention inputs, E hidden, F ffn, H query heads, K kv heads, C channels of a
head, P positions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from rollout.models.spec import ModelSpec
from spec_workers.draft_training.attention import rotate

KeysValues = tuple[torch.Tensor, torch.Tensor]  # each [R, K, C]


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x_RE: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x_RE.float(), self.weight.shape, self.weight, self._eps)


class SelfAttention(nn.Module):
    def __init__(self, spec: ModelSpec, inputs: int, cos_sin_PC: torch.Tensor) -> None:
        super().__init__()
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(inputs, heads, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, spec.hidden_size, bias=False)
        self.head_dim = spec.head_dim
        self.register_buffer("cos_sin_PC", cos_sin_PC, persistent=False)

    def queries(self, x_RI: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """[R, H, C], rotated."""
        return self._rotated(self.q_proj(x_RI), positions_R)

    def keys_values(self, x_RI: torch.Tensor, positions_R: torch.Tensor) -> KeysValues:
        """Keys rotated."""
        values = self.v_proj(x_RI).unflatten(1, (-1, self.head_dim))
        return self._rotated(self.k_proj(x_RI), positions_R), values

    def _rotated(self, projected: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.cos_sin_PC, torch.Tensor)
        # Guesses beyond the context's end are of tokens that never come: any angle will do.
        positions_R = positions_R.clamp(max=len(self.cos_sin_PC) - 1)
        return rotate(projected.unflatten(1, (-1, self.head_dim)), positions_R, self.cos_sin_PC)


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x_RE)) * self.up_proj(x_RE))


class DecoderLayer(nn.Module):
    """All but the norm before the attention, which is its model's."""

    def __init__(self, spec: ModelSpec, inputs: int, cos_sin_PC: torch.Tensor) -> None:
        super().__init__()
        self.self_attn = SelfAttention(spec, inputs, cos_sin_PC)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = Mlp(spec.hidden_size, spec.ffn_size)

    def finish(self, residual_RE: torch.Tensor, attended_RX: torch.Tensor) -> torch.Tensor:
        """From what the rows attended to, to the residual stream that leaves the layer."""
        residual_RE = residual_RE + self.self_attn.o_proj(attended_RX)
        return residual_RE + self.mlp(self.post_attention_layernorm(residual_RE))
