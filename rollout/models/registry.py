"""Which class runs which architecture. ModelSpec.read has refused all others by then."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from rollout.models.causal_lm import CausalLM
from rollout.models.hybrid import Hybrid
from rollout.models.hybrid_config import HYBRIDS
from rollout.models.llama import Llama
from rollout.models.spec import ModelSpec
from rollout.parallel import ModelRanks


class ModelClass(Protocol):
    def __call__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        packing: bool,
        ranks: ModelRanks,
    ) -> CausalLM: ...


MODEL_CLASSES: Mapping[str, ModelClass] = MappingProxyType(
    {
        "LlamaForCausalLM": Llama,
        "MistralForCausalLM": Llama,
        "Qwen2ForCausalLM": Llama,
        "Qwen3ForCausalLM": Llama,
        "Qwen3MoeForCausalLM": Llama,
        "MiMoForCausalLM": Llama,
        **dict.fromkeys(HYBRIDS, Hybrid),
    }
)
