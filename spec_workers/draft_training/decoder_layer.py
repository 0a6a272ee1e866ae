"""A trainable Llama decoder layer, in the parts that a draft's passes need.

Parameters have a checkpoint layer's names. Attention follows EAGLE-3's training-time test (Li et
al. 2025): a row of an unrolled step corresponds to a row of the first pass, `step` tokens further
on. It sees the rows of the first pass that that row saw, and of the later passes only its own
ancestors.

Legend: R rows, L rows of the first pass, S links of a chain, I attention inputs, E hidden, F ffn,
H query heads, K kv heads, G query heads of a kv head, C channels of a head, P positions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import silu

from rollout.models.spec import ModelSpec


def attend(
    q_RHC: torch.Tensor,
    k_LKC: torch.Tensor,
    v_LKC: torch.Tensor,
    visible_R: torch.Tensor,
    chain: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attention of the rows of one sequence: [R, H * C].

    Row r sees the first ``visible_R[r]`` keys of L, and row r of each link of ``chain``, whose keys
    and values are [R, K, C].
    """
    rows, heads, channels = q_RHC.shape
    kv_heads, length = k_LKC.shape[1], len(k_LKC)
    q_RKGC = q_RHC.unflatten(1, (kv_heads, -1))
    scores_KRGL = torch.matmul(
        q_RKGC.transpose(0, 1).flatten(1, 2), k_LKC.permute(1, 2, 0)
    ).unflatten(1, (rows, -1))
    hidden_RL = torch.arange(length, device=q_RHC.device) >= visible_R[:, None]
    scores_KRGL = scores_KRGL.masked_fill(hidden_RL[None, :, None], float("-inf"))
    links = [
        (q_RKGC * k_RKC[:, :, None]).sum(-1, keepdim=True).transpose(0, 1) for k_RKC, _ in chain
    ]
    scores = torch.cat([scores_KRGL, *links], dim=-1).float() * channels**-0.5
    weights = scores.softmax(-1).to(q_RHC.dtype)
    attended_KRGC = torch.matmul(
        weights[..., :length].flatten(1, 2), v_LKC.transpose(0, 1)
    ).unflatten(1, (rows, -1))
    for link, (_, v_RKC) in enumerate(chain):
        attended_KRGC = attended_KRGC + (
            weights[..., length + link, None] * v_RKC.transpose(0, 1)[:, :, None]
        )
    return attended_KRGC.transpose(0, 1).reshape(rows, heads * channels)


def rotate(
    x_RHC: torch.Tensor, positions_R: torch.Tensor, cos_sin_PC: torch.Tensor
) -> torch.Tensor:
    """Apply rotary position embedding, rotate-half convention. A new tensor in the dtype of
    ``x``."""
    cos_R1c, sin_R1c = cos_sin_PC[positions_R].unsqueeze(1).chunk(2, dim=-1)
    first, second = x_RHC.float().chunk(2, dim=-1)
    turned = (first * cos_R1c - second * sin_R1c, second * cos_R1c + first * sin_R1c)
    return torch.cat(turned, dim=-1).to(x_RHC.dtype)


KeysValues = tuple[torch.Tensor, torch.Tensor]  # each [R, K, C]


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x_RE: torch.Tensor) -> torch.Tensor:
        """The normed rows, float32 [R, E]."""
        return nn.functional.rms_norm(x_RE.float(), self.weight.shape, self.weight, self._eps)


class SelfAttention(nn.Module):
    """Projections of attention with rotary positions; `attend` does the rest."""

    def __init__(self, spec: ModelSpec, inputs: int, cos_sin_PC: torch.Tensor) -> None:
        super().__init__()
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(inputs, heads, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, spec.hidden_size, bias=False)
        self.head_dim = spec.head_dim
        self.q_norm, self.k_norm = (
            RmsNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None for _ in range(2)
        )
        self.register_buffer("cos_sin_PC", cos_sin_PC, persistent=False)

    def queries(self, x_RI: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        return self._rotated(self.q_proj(x_RI), positions_R, self.q_norm)

    def keys_values(self, x_RI: torch.Tensor, positions_R: torch.Tensor) -> KeysValues:
        """Rotated keys, and values, [R, K, C] each."""
        values = self.v_proj(x_RI).unflatten(1, (-1, self.head_dim))
        return self._rotated(self.k_proj(x_RI), positions_R, self.k_norm), values

    def _rotated(
        self, projected: torch.Tensor, positions_R: torch.Tensor, norm: RmsNorm | None
    ) -> torch.Tensor:
        assert isinstance(self.cos_sin_PC, torch.Tensor)
        # Guesses beyond the context's end are never compared: any angle will do.
        positions_R = positions_R.clamp(max=len(self.cos_sin_PC) - 1)
        heads_RHC = projected.unflatten(1, (-1, self.head_dim))
        if norm is not None:
            heads_RHC = norm(heads_RHC).to(projected.dtype)
        return rotate(heads_RHC, positions_R, self.cos_sin_PC)


class TrainableMlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x_RE)) * self.up_proj(x_RE))


class TrainableDecoderLayer(nn.Module):
    """A decoder layer without the norm before attention, which belongs to its model."""

    def __init__(self, spec: ModelSpec, inputs: int, cos_sin_PC: torch.Tensor) -> None:
        super().__init__()
        self.self_attn = SelfAttention(spec, inputs, cos_sin_PC)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = TrainableMlp(spec.hidden_size, spec.ffn_size)

    def finish(self, residual_RE: torch.Tensor, attended_RX: torch.Tensor) -> torch.Tensor:
        """The residual stream that leaves the layer, [R, E], from the result of `attend`."""
        residual_RE = residual_RE + self.self_attn.o_proj(attended_RX)
        return residual_RE + self.mlp(self.post_attention_layernorm(residual_RE))
