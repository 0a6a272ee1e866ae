"""The specs of layers that are not attention and a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """Gated delta rule layers (Yang et al. 2024, Gated Delta Networks), as Qwen3-Next has them."""

    layers: tuple[int, ...]  # which of the model's layers; the others are full attention
    num_key_heads: int  # H; query heads are as many
    num_value_heads: int  # G, a multiple of H: value head g reads key head g // (G // H)
    key_dim: int  # K, of one head; queries' too
    value_dim: int  # V, of one head
    conv_width: int  # W: taps of the convolution before
    interleaved: bool = False  # checkpoints keep the input projections key head by key head

    @property
    def channels(self) -> int:
        """C: queries, keys and values, which are convolved together, in this order."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Sparse layers: a router and experts instead of one MLP."""

    layers: tuple[int, ...]  # which of the model's layers
    num_experts: int
    experts_per_token: int
    ffn_size: int  # of one expert
    shared_ffn_size: int = (
        0  # of an expert that every token passes, with a gate of its own; 0: none
    )
    normalizes: bool = True  # whether the chosen experts' probabilities are scaled to add up to 1
