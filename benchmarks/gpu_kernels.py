"""Compile the kernels of a session on a GPU before it, without a GPU.

    PYTHONPATH=. python benchmarks/gpu_kernels.py --output build/gpu-bundle/kernels.tar.gz

An H100 spends a minute of a session on compiling. Here the checks and steps run on a pretended GPU,
which notes what they launch; each variant is compiled for Hopper. Triton looks it up by its own
version and Python's, so this needs those of the GPU machine (`make gpu-bundle`). What is missing
in the archive is compiled there as ever.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_gpu_ops
import bench_step
import decoding
import gpu_smoke
import torch
import triton_cache
from harness.roofline import Ceilings
from harness.shapes import SHAPES
from triton.compiler import ASTSource, compile

from rollout.ops.matmul.tiles import tiles
from rollout.ops.matmul.triton import tiled_matmul
from tests.helpers.fake_cuda import FakeGpu, pretended_gpu
from tests.helpers.fake_cuda.launches import Launch
from tests.helpers.fake_cuda.models import send_weights
from tests.helpers.triton_compile import HOPPER

_CEILINGS = Ceilings(name="a pretended H100", bytes_per_second=3e12, flop_per_second=7e14)

Variant = tuple[str, str, tuple[dict, dict, dict], dict[str, Any]]
"""A kernel's module and name, its signature, constants and attributes, and its options."""


def checks() -> None:
    """Attention, the sampler and an engine in bfloat16, as `gpu_smoke.py` runs them."""
    with torch.inference_mode():
        for check in (gpu_smoke.attention, gpu_smoke.sampler):
            list(check("cuda"))
    list(gpu_smoke.engine("cuda"))


def products() -> None:
    """Every tile, for the 8B shape."""
    for outputs, inputs in bench_gpu_ops.products().values():
        weight_OI = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        for tile in tiles(torch.bfloat16):
            tiled_matmul(weight_OI.new_empty(72, inputs), weight_OI, None, tile)


def steps() -> None:
    """Steps of the 8B shape, two layers of it."""
    options = argparse.Namespace(batch=[1, 8, 32], context=2048, device="cuda", nodes=8)
    shape = dataclasses.replace(SHAPES["8b"], num_layers=2)
    list(bench_step.shape_rows("8b", shape, options))


PARTS: tuple[Callable[[], None], ...] = (checks, products, steps)


def recorded(parts: Sequence[Callable[[], None]]) -> list[Variant]:
    """The distinct variants of kernels that these parts launch."""
    found: dict[str, Launch] = {}
    with (
        patch.object(decoding, "send_random_weights", send_weights),
        patch.object(gpu_smoke, "_rows_that_differ", lambda one, other: one.shape != other.shape),
        patch.object(Ceilings, "of", lambda device: _CEILINGS),
    ):
        for part in parts:
            gpu: FakeGpu
            with pretended_gpu() as gpu:
                part()
                found |= {launch.key: launch for launch in gpu.launches.distinct()}
    return [
        (each.kernel.__module__, each.name, each.arguments, each.options) for each in found.values()
    ]


def build(variant: Variant) -> None:
    """Compile a variant into Triton's cache. Raises what Triton and ptxas raise."""
    module, name, arguments, options = variant
    kernel = getattr(importlib.import_module(module), name)
    compile(ASTSource(kernel, *arguments), target=HOPPER, options=options)


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--output", type=Path, required=True, metavar="ARCHIVE")
    options = arguments.parse_args(arguments_given)
    began = time.monotonic()
    variants = recorded(PARTS)
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TRITON_CACHE_DIR": cache, "TRITON_STORE_BINARY_ONLY": "1"}
        with patch.dict(os.environ, environment), ProcessPoolExecutor() as pool:
            list(pool.map(build, variants))
        print(triton_cache.pack(Path(cache), options.output))
    print(
        f"{len(variants)} variants for {triton_cache.made_by()}: {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
