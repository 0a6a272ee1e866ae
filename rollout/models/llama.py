"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 (qkv bias) and Qwen3 (normed q and k).

Sources: Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen2 (Yang et al. 2024), Qwen3
(Yang et al. 2025). They differ in what their ModelSpec says, and in nothing else.

Legend: T query rows, R sampled rows, E hidden, F ffn, V vocabulary, H query heads, K kv heads,
D head dim, P positions.
"""

from __future__ import annotations

import torch

from rollout.layers.destination import Destination, with_alias
from rollout.layers.linear import Linear
from rollout.layers.rope import cos_sin_table
from rollout.layers.storage import allocate_storage, free_storage
from rollout.models.causal_lm import LayerAttention
from rollout.models.features import Taps
from rollout.models.spec import ModelSpec
from rollout.ops.rms_norm import add_rms_norm, rms_norm
from rollout.ops.rotary import rotary_
from rollout.ops.silu_mul import silu_mul


class LlamaLayer:
    """The weights of one decoder layer; query, key and value, and gate and up, are fused."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, packing: bool
    ) -> None:
        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device, packing=packing)

        def norm(width: int) -> torch.Tensor:
            return torch.empty(width, dtype=dtype, device=device)

        hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
        kv_heads = spec.num_kv_heads * spec.head_dim
        self.attention_norm_E = norm(hidden)
        self.qkv = linear(hidden, heads + 2 * kv_heads, spec.qkv_bias)
        self.q_norm_D = norm(spec.head_dim) if spec.qk_norm else None
        self.k_norm_D = norm(spec.head_dim) if spec.qk_norm else None
        self.o = linear(heads, hidden, spec.o_bias)
        self.mlp_norm_E = norm(hidden)
        self.gate_up = linear(hidden, 2 * spec.ffn_size, spec.mlp_bias)
        self.down = linear(spec.ffn_size, hidden, spec.mlp_bias)


class Llama:
    """See CausalLM. Weights are uninitialised until written through ``destinations``."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        packing: bool = True,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.embedding_VE = torch.empty(
            spec.vocab_size, spec.hidden_size, dtype=dtype, device=device
        )
        self.layers = [
            LlamaLayer(spec, dtype=dtype, device=device, packing=packing)
            for _ in range(spec.num_layers)
        ]
        self.final_norm_E = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.head = Linear(
            spec.hidden_size,
            spec.vocab_size,
            dtype=dtype,
            device=device,
            packing=packing,
            table_OI=self.embedding_VE if spec.tied_embeddings else None,
        )
        self.cos_sin_PD = cos_sin_table(spec.rope, spec.head_dim, spec.max_context_len, device)
        self._next_norms_E = [layer.attention_norm_E for layer in self.layers[1:]]
        self._next_norms_E.append(self.final_norm_E)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: LayerAttention,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the final norm. Each norm is done where its residual is."""
        spec, eps = self.spec, self.spec.rms_norm_eps
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        residual_TE = self.embedding_VE[input_ids_T]
        hidden_TE = rms_norm(residual_TE, self.layers[0].attention_norm_E, eps)
        for index, (layer, next_norm_E) in enumerate(
            zip(self.layers, self._next_norms_E, strict=True)
        ):
            if taps is not None:
                taps.enter(index, residual_TE)
            qkv_THD = layer.qkv(hidden_TE).view(-1, sum(heads), spec.head_dim)
            q_THD, k_TKD, v_TKD = qkv_THD.split(heads, dim=1)
            if layer.q_norm_D is not None and layer.k_norm_D is not None:
                q_THD = rms_norm(q_THD, layer.q_norm_D, eps)
                k_TKD = rms_norm(k_TKD, layer.k_norm_D, eps)
            rotary_(q_THD, k_TKD, positions_T, self.cos_sin_PD)
            attended_THD = attention.run(index, q_THD, k_TKD, v_TKD)

            hidden_TE = layer.o(attended_THD.flatten(1))
            hidden_TE = add_rms_norm(hidden_TE, residual_TE, layer.mlp_norm_E, eps)
            hidden_TE = layer.down(silu_mul(layer.gate_up(hidden_TE)))
            hidden_TE = add_rms_norm(hidden_TE, residual_TE, next_norm_E, eps)
        if taps is not None:
            taps.enter(spec.num_layers, residual_TE)
            taps.leave(hidden_TE)
        return hidden_TE

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_RE)

    def linears(self) -> list[Linear]:
        products = [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in self.layers]
        return [linear for layer in products for linear in layer] + [self.head]

    def finish_loading(self) -> None:
        for linear in self.linears():
            linear.pack()

    def release(self) -> int:
        freed = sum(linear.release() for linear in self.linears())
        return freed + sum(free_storage(tensor) for tensor in self._plain_weights())

    def allocate(self) -> None:
        for tensor in self._plain_weights():
            allocate_storage(tensor)
        for linear in self.linears():
            linear.allocate()

    def _plain_weights(self) -> list[torch.Tensor]:
        """Those that are no product's, the embedding included."""
        norms = [
            norm
            for layer in self.layers
            for norm in (layer.attention_norm_E, layer.q_norm_D, layer.k_norm_D, layer.mlp_norm_E)
            if norm is not None
        ]
        return [self.embedding_VE, *norms, self.final_norm_E]

    def destinations(self) -> dict[str, Destination]:
        spec = self.spec
        head = self.head.weight_rows(0, spec.vocab_size)
        if spec.tied_embeddings:
            found = with_alias("model.embed_tokens.weight", "lm_head.weight", head)
        else:
            embedding = Destination.of(self.embedding_VE)
            found = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        found["model.norm.weight"] = Destination.of(self.final_norm_E)

        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        for index, layer in enumerate(self.layers):
            at = f"model.layers.{index}"
            norms = {
                "input_layernorm": layer.attention_norm_E,
                "self_attn.q_norm": layer.q_norm_D,
                "self_attn.k_norm": layer.k_norm_D,
                "post_attention_layernorm": layer.mlp_norm_E,
            }
            for name, norm in norms.items():
                if norm is not None:
                    found[f"{at}.{name}.weight"] = Destination.of(norm)
            attention, mlp = f"{at}.self_attn", f"{at}.mlp"
            qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
            found |= _parts(attention, layer.qkv, qkv)
            found |= _parts(attention, layer.o, {"o_proj": spec.hidden_size})
            gate_up = {"gate_proj": spec.ffn_size, "up_proj": spec.ffn_size}
            found |= _parts(mlp, layer.gate_up, gate_up)
            found |= _parts(mlp, layer.down, {"down_proj": spec.hidden_size})
        return found


def _parts(prefix: str, linear: Linear, widths: dict[str, int]) -> dict[str, Destination]:
    """A fused product's rows, part by part under the names checkpoints have for them."""
    found: dict[str, Destination] = {}
    start = 0
    for name, width in widths.items():
        found[f"{prefix}.{name}.weight"] = linear.weight_rows(start, start + width)
        if linear.bias_O is not None:
            found[f"{prefix}.{name}.bias"] = linear.bias_rows(start, start + width)
        start += width
    return found
