"""Qwen3-Next (Qwen 2025) and Qwen3.5 (Qwen 2026): recurrent layers between attention layers.

Their checkpoints name the decoder in one of two ways, as models with a vision tower or without.
"""

from __future__ import annotations

from dataclasses import replace

from rollout.models.causal_lm import CausalLM
from rollout.models.layers.weight_loader import WeightLoader, with_alias


class Hybrid(CausalLM):
    """A Qwen3-Next or Qwen3.5."""

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders under every prefix of ``spec.decoder_names``; the first is the config's own."""
        prefixes = self.spec.decoder_names
        plain = super().weight_loaders()
        if prefixes == ("model",):
            return plain
        found: dict[str, WeightLoader] = {}
        for name, loader in plain.items():
            own, *others = _spellings(name, prefixes)
            if loader.alias_of is not None or loader.parts:
                canonical = loader.alias_of and _spellings(loader.alias_of, prefixes)[0]
                parts = tuple(_spellings(part, prefixes)[0] for part in loader.parts)
                loader = replace(loader, alias_of=canonical, parts=parts)
            found[own] = loader
            for other in others:
                found |= with_alias(own, other, loader)
        return found


def _spellings(name: str, prefixes: tuple[str, ...]) -> list[str]:
    """A tensor's names with each of these decoder prefixes instead of ``model``."""
    if not name.startswith("model."):
        return [name]
    return [f"{prefix}.{name.removeprefix('model.')}" for prefix in prefixes]
