"""Do the rows of a matrix product depend on how many there are? Asked once, at start.

Libraries choose kernels by the number of rows, and some choices change the order of a row's sum.
Exact mode needs one order for every step, so each shape in use is tried and steps are padded to
the least number of rows from which all counts agree. On a GPU the products are ours, one order for
any number of rows; that is asked all the same, of every tile that a step can run. Where tiles
disagree, the largest set of them that agrees is used and the others are left out.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from rollout.errors import ExactnessError
from rollout.layers.linear import Linear
from rollout.ops import gpu
from rollout.ops.matmul.tiles import Tile, tiles, tiles_up_to

log = logging.getLogger(__name__)

LARGEST_PADDING = 16
# Dense where kernels' tiles are a few rows high, then around multiples of larger blocks.
_ROW_COUNTS = (*range(1, 18), 24, 25, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257)
_ONE_THREAD_ROW_COUNTS = (1, 2, 3, 4, 5, 8, 11, 33, 128)
_AFFORDABLE = 2**30  # multiply-adds of one product: a few milliseconds
_DISTINCT_OUTPUTS = 512
_MOST_ON_A_GPU = 300  # more than a tile has; their own would have outputs of gigabytes


def make_row_invariant(linears: Iterable[Linear], max_rows: int) -> int:
    """Turn products on a GPU to those of ops.matmul; then as ``minimum_rows``.

    Each product is told its own least number of rows, for experts run fewer than a step has, and
    on a GPU which tiles it is to leave out.
    """
    linears = list(linears)
    for linear in linears:
        linear.row_invariant = linear.device.type == "cuda"
    found = _found_by_signature(linears, max_rows)
    for linear in linears:
        linear.least_rows, linear.left_out_tiles = found[_signature(linear)]
    return max((least for least, _ in found.values()), default=1)


def minimum_rows(linears: Iterable[Linear], max_rows: int) -> int:
    """The least M0 such that all sampled row counts in [M0, max_rows] give bitwise equal rows.

    Rows are compared across counts, places, orders and, on the CPU, one thread against all, for
    every distinct shape among ``linears``. Raises ExactnessError, naming the shape, where no M0 up
    to LARGEST_PADDING holds.
    """
    found = _found_by_signature(linears, max_rows).values()
    return max((least for least, _ in found), default=1)


@torch.inference_mode()
def _found_by_signature(
    linears: Iterable[Linear], max_rows: int
) -> dict[tuple[object, ...], tuple[int, frozenset[Tile]]]:
    """The least number of rows of each kind of product, and the tiles it leaves out."""
    shapes = {_signature(linear): linear for linear in linears}
    found = {}
    for shape, linear in shapes.items():
        with gpu.on(linear.device):
            probe = _cancelling_probe(linear)
            if linear.device.type == "cuda":
                x_MI = _cancelling_rows(min(max_rows, _MOST_ON_A_GPU), linear)
                probe.left_out_tiles = disagreeing_tiles(probe, x_MI, max_rows)
            found[shape] = _minimum_rows(probe, max_rows), probe.left_out_tiles
    return found


def _minimum_rows(probe: Linear, max_rows: int) -> int:
    most = max(max_rows, LARGEST_PADDING)
    if probe.device.type == "cuda":
        most = min(most, _MOST_ON_A_GPU)
    x_MI = _cancelling_rows(most, probe)
    y_MO = probe(x_MI)

    affordable = most
    if probe.device.type == "cpu":
        cost = probe.in_features * probe.out_features
        affordable = max(LARGEST_PADDING, _AFFORDABLE // cost)
    order_M = _shuffled(most, probe)

    def differing_among(counts: tuple[int, ...]) -> set[int]:
        differing = set()
        for count in counts:
            rows = order_M[:count]
            if count <= min(most, affordable) and not torch.equal(probe(x_MI[rows]), y_MO[rows]):
                differing.add(count)
        return differing

    differing = differing_among(_ROW_COUNTS)
    if probe.device.type == "cpu" and torch.get_num_threads() > 1:
        with _one_thread():
            differing |= differing_among(_ONE_THREAD_ROW_COUNTS)

    least = max(differing, default=0) + 1
    if probe.device.type == "cpu" and not probe.is_packed:
        # Plain products choose kernels by alignment too, which a probe sees only now and then.
        least = max(least, LARGEST_PADDING)
    if least > LARGEST_PADDING:
        raise ExactnessError(
            f"exact=true: rows of {_described(probe)} differ between {sorted(differing)} and "
            f"{most} rows; set exact=false"
        )
    return least


def disagreeing_tiles(probe: Linear, x_MI: torch.Tensor, max_rows: int) -> frozenset[Tile]:
    """The tiles that products of up to ``max_rows`` rows are to leave out on a GPU: all but the
    largest set that gives each row of ``x_MI`` the same bits, wherever the row lies.

    Others may come in their place, and are tried too. Raises ExactnessError where none is left.
    """
    from rollout.ops.matmul.triton import tiled_matmul

    weight_OI = probe.weight_rows(0, probe.out_features).read()
    processors = gpu.multiprocessors(probe.device)
    order_M = _shuffled(len(x_MI), probe)
    alike: list[tuple[torch.Tensor, set[Tile]]] = []  # by the rows they compute
    tried: set[Tile] = set()
    agreeing: set[Tile] = set()
    while len(tried - agreeing) < len(tiles(probe.dtype)):
        in_use = tiles_up_to(
            probe.dtype, max_rows, probe.out_features, processors, tried - agreeing
        )
        if agreeing.issuperset(in_use):
            break
        for tile in (tile for tile in in_use if tile not in tried):
            y_MO = tiled_matmul(x_MI, weight_OI, probe.bias_O, tile)
            moved_MO = tiled_matmul(x_MI[order_M], weight_OI, probe.bias_O, tile)
            if torch.equal(moved_MO, y_MO[order_M]):
                of_it = next((some for like, some in alike if torch.equal(like, y_MO)), None)
                if of_it is None:
                    alike.append((y_MO, of_it := set()))
                of_it.add(tile)
        tried.update(in_use)
        agreeing = max((some for _, some in alike), key=len, default=agreeing)
    else:
        raise ExactnessError(
            f"exact=true: no tile gives a row of {_described(probe)} the same bits wherever the "
            "row lies; set exact=false"
        )
    left_out = frozenset(tried - agreeing)
    if left_out:
        log.warning(
            "%s leaves out the tiles that disagree with %d others: %s",
            _described(probe), len(agreeing), "; ".join(map(str, left_out)),
        )  # fmt: skip
    return left_out


def _described(linear: Linear) -> str:
    return (
        f"the {linear.in_features} -> {linear.out_features} product in {linear.dtype} on "
        f"{linear.device}"
    )


def _shuffled(count: int, linear: Linear) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(linear.device)


def _signature(linear: Linear) -> tuple[object, ...]:
    """What kernels are chosen by; values are not among it."""
    return (
        linear.in_features,
        linear.out_features,
        linear.bias_O is not None,
        linear.dtype,
        linear.device,
        linear.is_packed,
        linear.row_invariant,
    )


def _cancelling_probe(linear: Linear) -> Linear:
    """A Linear of the same kind whose every sum cancels: what is left is rounding alone.

    So a changed order of summation shows in every output, where with random weights the last
    step's rounding to bfloat16 would hide it from nearly all. The second half of a weight row is
    the first half negated and reversed; an odd last feature is zero.
    """
    half = linear.in_features // 2
    outputs = min(linear.out_features, _DISTINCT_OUTPUTS)
    first = torch.randn(outputs, half, generator=torch.Generator().manual_seed(1))
    odd = first.new_zeros(outputs, linear.in_features % 2)
    block = torch.cat([first, -first.flip(1), odd], dim=1).to(linear.device, linear.dtype)
    probe = Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias_O is not None,
        dtype=linear.dtype,
        device=linear.device,
        packing=linear.is_packed,
    )
    probe.row_invariant = linear.row_invariant
    for start in range(0, linear.out_features, outputs):
        stop = min(start + outputs, linear.out_features)
        probe.weight_rows(start, stop).write(block[: stop - start])
    if probe.bias_O is not None:
        probe.bias_O.zero_()
    probe.pack()
    return probe


def _cancelling_rows(count: int, linear: Linear) -> torch.Tensor:
    half = linear.in_features // 2
    first = torch.randn(count, half, generator=torch.Generator().manual_seed(2))
    odd = first.new_zeros(count, linear.in_features % 2)
    return torch.cat([first, first.flip(1), odd], dim=1).to(linear.device, linear.dtype)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
