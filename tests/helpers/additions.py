"""The order in which a compiled kernel adds up floating-point numbers, as far as layouts decide it.

Triton chooses how a tensor lies in the registers of a block's threads by what is loaded: by the
width of an element and by what is known of its address. A sum then goes thread by thread, so two
variants of one kernel may round differently although their source is the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tests.helpers.fake_cuda.launches import Launch
from tests.helpers.triton_compile import dialects

_ALIAS = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
_FOLDED = re.compile(
    r'"tt\.(reduce|scan)"\(.*?\) <\{axis = (\d+) : i32.*?\}> \(\{(.*?)\}\) : \((.*?)\) ->',
    re.DOTALL,
)
_TENSOR = re.compile(r"tensor<((?:\d+x)+)(\w+), (#\w+)>")

_BY_DTYPE = {"_bins_kernel", "_threshold_kernel"}
"""Kernels whose sums decide which tokens of a row are kept. A row's own parameters alone say
whether its logits are float32."""


class Addition(NamedTuple):
    """``length`` numbers of one dtype that are added up, and how they lie in registers."""

    operation: str
    dtype: str
    length: int
    layout: str


def additions(ttgir: str) -> set[Addition]:
    """The additions of floating-point numbers. Integers need no order, and a tensor core's
    instruction fixes its own: see tests/ops/test_triton_compiles.py."""
    layouts = dict(_ALIAS.findall(ttgir))
    found = set()
    for operation, axis, body, operands in _FOLDED.findall(ttgir):
        if "arith.addf" not in body:
            continue
        for shape, dtype, alias in _TENSOR.findall(operands):
            length = int(shape.split("x")[int(axis)])
            layout = f"{shape}{layouts[alias]} along {axis}"
            found.add(Addition(operation, dtype, length, layout))
    return found


def differing_sums(launches: Iterable[Launch]) -> dict[str, list[str]]:
    """The sums that differ between variants of a kernel, any of which may compute a row; by
    kernel."""
    variants = defaultdict(list)
    for launch in launches:
        signature = launch.arguments[0]
        kind = launch.name
        if kind in _BY_DTYPE:
            kind += f" of {signature['logits_ptr']}"
        variants[kind].append(launch)
    found = {
        kind: differing(map(_additions_of, some)) for kind, some in variants.items() if some[1:]
    }
    return {kind: each for kind, each in found.items() if each}


def _additions_of(launch: Launch) -> set[Addition]:
    """The additions of the kernel as it is launched; it gets layouts only if it has any."""
    forms = dialects(launch.source, launch.options)
    without_layouts = next(forms)
    if not any("arith.addf" in body for _, _, body, _ in _FOLDED.findall(without_layouts)):
        return set()
    return additions(next(forms))


def differing(variants: Iterable[set[Addition]]) -> list[str]:
    """The sums of equally many numbers whose layout differs between two variants."""
    layouts: dict[tuple[str, str, int], dict[frozenset[str], None]] = defaultdict(dict)
    for variant in variants:
        own: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        for operation, dtype, length, layout in variant:
            own[operation, dtype, length].add(layout)
        for key, some in own.items():
            layouts[key][frozenset(some)] = None
    return [
        f"{key}: {[sorted(each) for each in some]}"
        for key, some in layouts.items()
        if len(some) > 1
    ]
