"""Decode steps of model families beside a dense model of the same sizes: time per layer.

A family's config has the dense one's hidden size, layers, heads and MLP, or its experts where the
family has some. The time of a layer is what a deep model takes longer than a shallow one, divided
by the layers it has more: embedding, head, sampling and scheduling do not count. All engines take
turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from decoding import TIMED, open_engine, start, step_seconds, stop
from harness.rows import Row, row
from harness.shapes import Shape, change_config, write_config
from harness.timing import in_turns, no_garbage_collection, paired

from rollout import RolloutEngine

DEEP, SHALLOW = 3, 1
BATCH = 8

DENSE = Shape(  # Qwen3-0.6B's, but for layers and vocabulary
    hidden_size=1024, num_layers=DEEP, num_heads=16, num_kv_heads=8, head_dim=128, ffn_size=3072,
    vocab_size=4096, tied=True,
)  # fmt: skip
_LATENT = {  # its heads have the dims of DeepSeek-V2, V3 and Moonlight
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "num_key_value_heads": DENSE.num_heads, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": DEEP,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}

Changes = Mapping[str, Any]
DENSE_MODELS: Mapping[str, tuple[Shape, Changes]] = {
    "Qwen3": (DENSE, {"architectures": ["Qwen3ForCausalLM"]}),
    "Qwen3-MoE": (DENSE, {"architectures": ["Qwen3MoeForCausalLM"]} | _EXPERTS),
}
FAMILIES: Mapping[str, tuple[Shape, Changes, str, float]] = {
    "Mistral, windows": (
        DENSE, {"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "Qwen3", 1.25,
    ),
    "Gemma 3, windows": (
        DENSE, {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 128}, "Qwen3", 1.25,
    ),
    "gpt-oss, windows and sinks": (
        DENSE,
        {"architectures": ["GptOssForCausalLM"], "sliding_window": 128, "num_local_experts": 8,
         "num_experts_per_tok": 2, "intermediate_size": 768},
        "Qwen3-MoE", 1.25,
    ),
    "latent attention": (DENSE, _LATENT, "Qwen3", 1.5),
    "latent attention, queries too": (DENSE, _LATENT | {"q_lora_rank": 768}, "Qwen3", 1.5),
}  # fmt: skip
"""By name: sizes, changes of the config, the dense model to compare with, and the bar."""


def family_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds of a layer, and each family's beside those of its dense model."""
    lengths = [options.context] * BATCH
    models = dict(DENSE_MODELS) | {name: family[:2] for name, family in FAMILIES.items()}
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[tuple[str, int], RolloutEngine] = {}
        for name, (shape, changes) in models.items():
            for layers in (SHALLOW, DEEP):
                path = Path(folder) / f"{len(engines)}"
                change_config(write_config(path, replace(shape, num_layers=layers)), **changes)
                engines[name, layers] = open_engine(
                    path, [lengths], device=options.device, exact=True, nodes=0
                )
        running = {key: start(engine, lengths) for key, engine in engines.items()}
        calls = {key: partial(step_seconds, engine, BATCH) for key, engine in engines.items()}
        with no_garbage_collection():
            seconds = in_turns(calls, TIMED - 1)
        for key, engine in engines.items():
            stop(engine, running[key])
            engine.close()
    layer = {
        name: [
            (deep - shallow) / (DEEP - SHALLOW)
            for deep, shallow in zip(seconds[name, DEEP], seconds[name, SHALLOW], strict=True)
        ]
        for name in models
    }
    load = f"a layer, {options.context} keys, batch {BATCH}"
    for name, times in layer.items():
        yield row(f"{load}: {name}", 1e3 * statistics.median(times), "ms")
    for name, (_, _, dense, bar) in FAMILIES.items():
        ratio = paired(layer[name], layer[dense])
        yield row(f"{load}: {name} / {dense}", ratio, "x", bar, at_most=True)
