"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections in its checkpoints."""

from __future__ import annotations

from rollout.models.causal_lm import CausalLM
from rollout.models.layers.weight_loader import WeightLoader, fused_rows

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class Phi(CausalLM):
    """A Phi-3 or Phi-4, whose tensors may come fused or in parts."""

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders of the fused projections and of their parts."""
        found = super().weight_loaders()
        for layer in range(self.spec.num_layers):
            at = f"model.layers.{layer}"
            for fused, parts in _FUSED.items():
                names = [f"{at}.{part}.weight" for part in parts]
                found[f"{at}.{fused}.weight"] = fused_rows({name: found[name] for name in names})
        return found
