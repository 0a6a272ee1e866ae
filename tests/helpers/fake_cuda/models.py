"""Shapes that models are used in, as configurations of a few layers of random nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rollout import RolloutEngine
from rollout.config import EngineConfig, engine_config
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker
from tests.helpers.oracle_worker import OracleWorker

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "dtype": "bfloat16", "max_position_embeddings": 131_072,
    "num_hidden_layers": 2,
}  # fmt: skip


def _dense(heads: int, kv_heads: int, head_dim: int, hidden: int, ffn: int, vocab: int, **more):
    return _LLAMA | more | {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "demo": _dense(9, 3, 64, 576, 1536, 49_152, tie_word_embeddings=True),
    "8b": _dense(32, 8, 128, 4096, 14_336, 128_256),
    "qwen3-8b": _dense(32, 8, 128, 4096, 12_288, 151_936, architectures=["Qwen3ForCausalLM"]),
    "odd": _dense(6, 1, 80, 480, 1001, 32_003),
    # Qwen3-Next-80B-A3B, three of whose layers in four are recurrent, but for most of its 512
    # experts.
    "recurrent": _dense(
        16, 2, 256, 2048, 5120, 151_936, architectures=["Qwen3NextForCausalLM"],
        num_hidden_layers=4, num_experts=16, num_experts_per_tok=10, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, norm_topk_prob=True, mlp_only_layers=[0, 1, 2],
        decoder_sparse_step=1, linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        full_attention_interval=4,
    ),
    # DeepSeek-V3's attention and router, but for most of its heads and experts.
    "latent": _dense(
        32, 32, 64, 2048, 5120, 129_280, architectures=["DeepseekV3ForCausalLM"],
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=32, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=768, n_group=8, topk_group=4, norm_topk_prob=True,
        routed_scaling_factor=2.5, first_k_dense_replace=1,
    ),
    # gpt-oss-20b, but for most of its 32 experts: windows of 128, sinks.
    "windows": _dense(
        64, 8, 64, 2880, 2880, 201_088, architectures=["GptOssForCausalLM"], num_local_experts=8,
        num_experts_per_tok=4, sliding_window=128,
    ),
}  # fmt: skip


class NoTruth(dict):
    """Recorded rollouts of an oracle that knows none: every tree is random."""

    def __missing__(self, key: object) -> list[int]:
        return []


def make_engine(folder: Path, name: str, *, nodes: int = 0, **options: Any) -> RolloutEngine:
    """An engine on the pretended GPU, its weights sent by an update. ``nodes``: of the largest
    draft tree."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    config = engine_config(str(folder), {"device": "cuda", "load_format": "dummy"} | options)

    def build(config: EngineConfig, progress: object = None) -> SpecWorker:
        target = TargetWorker(config)
        return OracleWorker(target, NoTruth(), size=nodes, right=0.0, chain=False)

    engine = RolloutEngine.from_config(config, build)
    send_weights(engine)
    return engine


def send_weights(engine: RolloutEngine) -> None:
    """An update of empty tensors: a pretended device has no generator of random numbers."""
    model = engine.worker.target.model
    engine.update_weights_from_tensor(
        (name, torch.empty(loader.shape, dtype=model.dtype, device=model.device))
        for name, loader in model.weight_loaders().items()
        if loader.required
    )
