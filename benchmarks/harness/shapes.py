"""Models whose weights do not matter: shapes, folders an engine starts from, random weights."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.command import Command, Parts
from harness.rows import Row
from rollout import RolloutEngine
from rollout.config import DType, LoadFormat
from rollout.models.loader import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense Llama-like model. Sizes as config.json names them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return (attention + 3 * self.ffn_size) * self.hidden_size

    @property
    def kv_numbers(self) -> int:
        """Numbers that a layer stores for a token."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def product_parameters(self) -> int:
        """Parameters read in every forward that is sampled from: all but the embedding."""
        return self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size

    def config(self) -> dict[str, Any]:
        """Fields of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "dtype": "bfloat16",
        }


SHAPES = {
    "tiny": Shape(
        hidden_size=128, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=256,
        vocab_size=49_152, tied=True,
    ),
    "demo": Shape(
        hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, ffn_size=1536,
        vocab_size=49_152, tied=True,
    ),
    "even": Shape(  # the demo's size, with heads that 2 and 4 ranks can share
        hidden_size=576, num_layers=30, num_heads=8, num_kv_heads=4, head_dim=64, ffn_size=1536,
        vocab_size=49_152, tied=True,
    ),
    "8b": Shape(
        hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
        ffn_size=14_336, vocab_size=128_256,
    ),
}  # fmt: skip


def add_shape_options(command: Command) -> None:
    """Add ``--shape``, which may be given several times, and ``--device``."""
    command.option("--shape", [], choices=SHAPES, action="append", help="model of random weights")
    command.option("--device", "cuda" if torch.cuda.is_available() else "cpu")


def chosen_shapes(options: argparse.Namespace, *on_gpu: str) -> dict[str, Shape]:
    """The shapes named, else those for a GPU; without a GPU the tiny one."""
    usual = on_gpu if torch.cuda.is_available() and not options.quick else ("tiny",)
    return {name: SHAPES[name] for name in options.shape or usual}


def shape_parts(
    rows: Callable[[str, Shape, argparse.Namespace], Iterator[Row]], *on_gpu: str
) -> Callable[[argparse.Namespace], Parts]:
    """The parts of a benchmark that measures one shape after the other."""
    return lambda options: {
        name: partial(rows, name, shape, options)
        for name, shape in chosen_shapes(options, *on_gpu).items()
    }


def write_config(folder: Path, shape: Shape) -> Path:
    """Write a config.json and nothing else: for ``load_format="dummy"``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return folder


def write_checkpoint(folder: Path, shape: Shape) -> Path:
    """Write a config.json and random weights."""
    write_config(folder, shape)
    model = load_model(
        folder, DType.bfloat16, torch.device("cpu"), load_format=LoadFormat.dummy, packing=False
    )
    loaders = model.weight_loaders().items()
    tensors = {
        name: torch.randn(loader.shape, dtype=torch.bfloat16) / loader.shape[-1] ** 0.5
        for name, loader in loaders
        if loader.required
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def config_folder(shape: Shape) -> Iterator[Path]:
    """A folder with the shape's config.json, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_config(Path(folder), shape)


def write_draft(folder: Path, shape: Shape) -> Path:
    """A random EAGLE-3 draft for the shape: one layer, a vocabulary of 32,000 at most."""
    hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    draft_vocab = min(32_000, shape.vocab_size)
    heads = shape.num_heads * shape.head_dim
    products = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (shape.ffn_size, hidden),
        "midlayer.mlp.up_proj": (shape.ffn_size, hidden),
        "midlayer.mlp.down_proj": (hidden, shape.ffn_size),
        "lm_head": (draft_vocab, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm",
             "midlayer.post_attention_layernorm", "norm")  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = products | dict.fromkeys(norms, (hidden,))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": _normal(size, generator, torch.device("cpu"))
        for name, size in sizes.items()
    }
    if draft_vocab < shape.vocab_size:
        tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
        tensors["t2d"] = torch.arange(shape.vocab_size) < draft_vocab
    change_config(
        write_config(folder, shape),
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=draft_vocab,
        tie_word_embeddings=False,
    )
    save_file(tensors, folder / "model.safetensors")
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def random_engine(folder: Path, spec: str, **options: Any) -> RolloutEngine:
    """An engine of random weights from a folder with a config.json.

    ``options``: of `RolloutEngine.from_pretrained`.
    """
    engine = RolloutEngine.from_pretrained(str(folder), spec, load_format="dummy", **options)
    send_random_weights(engine)
    return engine


def send_random_weights(engine: RolloutEngine) -> None:
    """Update the target, tensor by tensor: activations stay of order one, logits small."""
    worker: Any = engine.worker

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        device = worker.model_device
        generator = torch.Generator(device).manual_seed(0)
        for name, loader in worker.target.model.weight_loaders().items():
            if loader.required:
                yield name, _normal(loader.shape, generator, device)

    engine.update_weights_from_tensor(tensors())


def _normal(
    size: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Normal values that keep activations of order one; ones for a norm."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16, device=device)
    values = torch.empty(size, dtype=torch.bfloat16, device=device)
    return values.normal_(0.0, size[-1] ** -0.5, generator=generator)
