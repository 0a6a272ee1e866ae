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
    """``length`` numbers of one dtype that are added up."""

    operation: str
    dtype: str
    length: int


def differing_sums(launches: Iterable[Launch]) -> dict[str, list[str]]:
    """The sums that differ between variants of a kernel, any of which may compute a row; by
    kernel."""
    variants = defaultdict(list)
    for launch in launches:
        kind = launch.name
        if kind in _BY_DTYPE:
            kind += f" of {launch.arguments[0]['logits_ptr']}"
        variants[kind].append(launch)
    found = {}
    for kind, some in variants.items():
        layouts = defaultdict(set)
        for launch in some if some[1:] else ():
            for addition, own in _layouts(launch).items():
                layouts[addition].add(frozenset(own))
        differing = [
            f"{key}: {sorted(map(sorted, own))}" for key, own in layouts.items() if len(own) > 1
        ]
        if differing:
            found[kind] = differing
    return found


def _layouts(launch: Launch) -> dict[Addition, set[str]]:
    """How the numbers of each addition of floating-point numbers lie in registers.

    Integers need no order, and a tensor core's instruction fixes its own. A kernel as it is
    launched gets layouts only if it has any additions.
    """
    forms = dialects(launch.source, launch.options)
    if not any("arith.addf" in body for _, _, body, _ in _FOLDED.findall(next(forms))):
        return {}
    ttgir = next(forms)
    aliases = dict(_ALIAS.findall(ttgir))
    found = defaultdict(set)
    for operation, axis, body, operands in _FOLDED.findall(ttgir):
        if "arith.addf" in body:
            for shape, dtype, alias in _TENSOR.findall(operands):
                length = int(shape.split("x")[int(axis)])
                layout = f"{shape}{aliases[alias]} along {axis}"
                found[Addition(operation, dtype, length)].add(layout)
    return found
