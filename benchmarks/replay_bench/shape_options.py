"""The options of benchmarks that open engines of given shapes on a device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from replay_bench.shapes import SHAPES, Shape


def add_shape_options(arguments: argparse.ArgumentParser) -> bool:
    """``--shape``, any number of them, and ``--device``. Whether there is a GPU."""
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter
    on_gpu = torch.cuda.is_available()
    arguments.add_argument("--shape", choices=SHAPES, action="append", default=[])
    arguments.add_argument("--device", default="cuda" if on_gpu else "cpu")
    return on_gpu


def chosen_shapes(options: argparse.Namespace, on_gpu: Sequence[str]) -> dict[str, Shape]:
    """``on_gpu``: what runs on one where none was named; elsewhere that is the tiny one."""
    usual = on_gpu if torch.cuda.is_available() else ["tiny"]
    return {name: SHAPES[name] for name in options.shape or usual}
