"""The recurrent half of a decoder layer: a short convolution and the gated delta rule.

Source: Gated Delta Networks (Yang, Kautz and Hatamizadeh 2024), as in Qwen3-Next and Qwen3.5.

Legend: T query rows, E hidden, C channels, W taps, H key heads of K dims, G value heads of V dims.
"""

from __future__ import annotations

import torch

from rollout.models.forward_context import LayerStates
from rollout.models.layers.linear import Linear, linear_weight_loaders
from rollout.models.layers.shard import shard_of, shards_of
from rollout.models.layers.split_linear import SplitLinear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.spec import ModelSpec
from rollout.ops.gates import delta_gates, gated_rms_norm
from rollout.parallel.partition import even_parts, scaled


class GatedDeltaNet:
    """A mixer whose input projections are one fused product.

    Its outputs are queries, keys, values, output gates, step sizes and decays, in this order. Decay
    rates and their biases are float32 in any model dtype.
    """

    def __init__(self, spec: ModelSpec, weights: WeightFactory) -> None:
        """``spec``: of this rank's part of the model."""
        assert spec.linear_attention is not None
        assert spec.entire.linear_attention is not None
        self.spec = spec.linear_attention
        self._entire = spec.entire.linear_attention
        self._group = group = weights.ranks.tensor
        self.eps = spec.rms_norm_eps
        value_heads, value_dim = self.spec.num_value_heads, self.spec.value_dim
        values = value_heads * value_dim
        self._widths = (self.spec.channels, values, value_heads, value_heads)

        self.inputs = weights.linear(spec.hidden_size, sum(self._widths))
        self.conv_CW = weights.tensor(self.spec.channels, self.spec.conv_width)
        self.log_rates_G = weights.tensor(value_heads, dtype=torch.float32)
        self.rate_bias_G = weights.tensor(value_heads, dtype=torch.float32)
        self.norm_V = weights.tensor(value_dim)
        self._values = self._parts(value_dim, by_key_head=False)
        self.output = SplitLinear(weights, group, self._values, spec.hidden_size)

    def __call__(self, index: int, hidden_TE: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """The mixer's output [T, E], to add to the residual. ``index``: among recurrent layers."""
        spec = self.spec
        values, keys = (-1, spec.num_value_heads, spec.value_dim), spec.num_key_heads * spec.key_dim
        x_TC, gate, b_TG, a_TG = self.inputs(hidden_TE).split(self._widths, dim=1)
        mixed_TC = states.convolve(index, x_TC, self.conv_CW, None)
        q, k, v = mixed_TC.split((keys, keys, spec.channels - 2 * keys), dim=1)
        log_decay_TG, beta_TG = delta_gates(a_TG, b_TG, self.log_rates_G, self.rate_bias_G)
        out_TGV = states.delta_rule(
            index,
            q.view(-1, spec.num_key_heads, spec.key_dim),
            k.view(-1, spec.num_key_heads, spec.key_dim),
            v.view(values),
            log_decay_TG,
            beta_TG,
        )
        normed_TGV = gated_rms_norm(out_TGV, gate.view(values), self.norm_V, self.eps)
        return self.output(normed_TGV.flatten(1))

    def linears(self) -> list[Linear]:
        """The mixer's matrix products."""
        return [self.inputs, self.output.linear]

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer."""
        return [self.conv_CW, self.log_rates_G, self.rate_bias_G, self.norm_V]

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. ``at``: their prefix, such as model.layers.0.linear_attn."""
        conv_C1W = self.conv_CW.unsqueeze(1)
        group, value_heads = self._group, self._parts(1, by_key_head=False)
        conv = WeightLoader.of(conv_C1W, (id(self.conv_CW), 0))
        found = {
            f"{at}.conv1d.weight": shard_of(conv, group, self._channel_parts()),
            f"{at}.A_log": shard_of(WeightLoader.of(self.log_rates_G), group, value_heads),
            f"{at}.dt_bias": shard_of(WeightLoader.of(self.rate_bias_G), group, value_heads),
            f"{at}.norm.weight": WeightLoader.of(self.norm_V),
        }
        found |= self.output.weight_loaders(at, "out_proj")
        return found | self._input_loaders(at)

    def _input_loaders(self, at: str) -> dict[str, WeightLoader]:
        spec, group = self.spec, self._group
        channels, values, step_sizes, decays = self._widths
        if not spec.interleaved:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            own = linear_weight_loaders(
                at, self.inputs, dict(zip(names, self._widths, strict=True))
            )
            heads = self._parts(1, by_key_head=False)
            parts = (self._channel_parts(), self._values, heads, heads)
            return shards_of(own, group, dict(zip(names, parts, strict=True)))
        per_key_head = spec.num_value_heads // spec.num_key_heads
        widths = {
            "in_proj_qkvz": (spec.key_dim, spec.key_dim, *[per_key_head * spec.value_dim] * 2),
            "in_proj_ba": (per_key_head,) * 2,
        }
        rows = {"in_proj_qkvz": channels + values, "in_proj_ba": step_sizes + decays}
        own = linear_weight_loaders(at, self.inputs, rows)
        for name, of_a_head in widths.items():
            name = f"{at}.{name}.weight"
            own[name] = own[name].reordered(_apart(of_a_head, spec.num_key_heads))
        by_head = {name: self._parts(sum(w), by_key_head=True) for name, w in widths.items()}
        return shards_of(own, group, by_head)

    def _parts(self, width: int, *, by_key_head: bool) -> tuple[range, ...]:
        """The ranks' parts of a dimension with ``width`` indices per head."""
        entire = self._entire
        heads = entire.num_key_heads if by_key_head else entire.num_value_heads
        return scaled(even_parts(heads, self._group.size), width)

    def _channel_parts(self) -> list[tuple[range, ...]]:
        """The ranks' parts of the convolution's channels: queries, keys and values."""
        entire = self._entire
        keys = entire.num_key_heads * entire.key_dim
        of_keys = self._parts(entire.key_dim, by_key_head=True)
        return [
            (q, range(keys + q.start, keys + q.stop), range(2 * keys + v.start, 2 * keys + v.stop))
            for q, v in zip(of_keys, self._values, strict=True)
        ]


def _apart(widths: tuple[int, ...], num_heads: int) -> torch.Tensor:
    """The row order that turns heads with parts of these widths into part after part."""
    rows = torch.arange(num_heads * sum(widths)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(widths, dim=1)])
