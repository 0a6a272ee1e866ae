"""Engines over random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from replay_bench.shapes import send_random_weights

from rollout import RolloutEngine


def random_engine(folder: Path, spec: str = "none", **options: Any) -> RolloutEngine:
    """``options``: of `RolloutEngine.from_pretrained`."""
    engine = RolloutEngine.from_pretrained(
        str(folder), spec, load_format="dummy", device="cpu", dtype="bfloat16", **options
    )
    worker: Any = engine.worker
    send_random_weights(engine, worker.target.model.weight_loaders())
    return engine


def states_bytes(folder: Path) -> int:
    """Of one state of all recurrent layers, by config.json alone, the model in bfloat16."""
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    recurrent = layers - layers // config["full_attention_interval"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    convolution = 2 * (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1)
    return recurrent * (convolution + 4 * values * config["linear_key_head_dim"])
