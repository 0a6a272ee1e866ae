"""Tests at start whether the rows of matrix products depend on the number of rows, or of outputs.

Libraries choose kernels by the number of rows, and some choices change the order of a row's sum.
Exact mode needs one order for every step. So each shape in use is tried, and steps are padded to
the smallest number of rows from which all counts agree. `ops.panel_matmul` multiplies few rows if
it can add them up in oneDNN's order, which is found by trying. On a GPU the products are this
package's, with one order for any number of rows; that is tested too, for every tile. If tiles
disagree, the largest set that agrees is used.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from rollout.errors import ExactnessError
from rollout.models.layers.linear import FEW_ROWS, Linear
from rollout.ops import gpu
from rollout.ops.matmul.tiles import TWO_BLOCK_TILES, Tile, tiles

log = logging.getLogger(__name__)

LARGEST_PADDING = 16
# Dense where kernels' tiles are a few rows high, then around multiples of larger blocks.
_LIBRARY_ROW_COUNTS = (FEW_ROWS + 1, 64, 65)  # the fewest that oneDNN multiplies beside our op
_ROW_COUNTS = (
    *range(1, 18), 24, 25, 32, 33, FEW_ROWS, 63, *_LIBRARY_ROW_COUNTS,
    96, 127, 128, 129, 255, 256, 257,
)  # fmt: skip
_ONE_THREAD_ROW_COUNTS = (1, 2, 3, 4, 5, 8, 11, 33, *_LIBRARY_ROW_COUNTS, 128)
_SUM_BLOCKS = (1024, 512, 256, 2048, 4096, 8192)  # inputs that oneDNN may sum in one chain
_AFFORDABLE = 2**30  # multiply-adds of one tested product: a few milliseconds
_DISTINCT_OUTPUTS = 512
_WIDTH = 64  # outputs of the product that others are compared with
_MAX_ON_A_GPU = 300  # rows: more than a tile has; max_rows would need gigabytes of outputs


def make_row_invariant(linears: Iterable[Linear], max_rows: int) -> int:
    """Make the rows of products independent of how many others there are.

    Products on a GPU become `ops.matmul`, without tiles that disagree. Packed products of few rows
    become oneDNN's where `ops.panel_matmul` does not add in the same order. Each product's
    ``min_rows`` is set, since experts run fewer rows than a step.

    Returns the smallest M0 such that all sampled row counts in [M0, max_rows] give bitwise equal
    rows. Rows are compared across counts, positions, orders and, on the CPU, one thread against
    all, for every distinct shape among ``linears``. Raises ExactnessError, naming the shape, if no
    M0 up to LARGEST_PADDING works.
    """
    linears = list(linears)
    on_gpu = [linear for linear in linears if linear.device.type == "cuda"]
    for linear in on_gpu:
        linear.row_invariant = True
    for dtype in {linear.dtype for linear in on_gpu}:
        same = [linear for linear in on_gpu if linear.dtype is dtype]
        left_out = _left_out_tiles(same, max_rows)
        for linear in same:
            linear.left_out_tiles = left_out
    tested: dict[tuple[object, ...], Linear] = {}
    for linear in linears:
        first = tested.get(_signature(linear))
        if first is None:
            first = tested[_signature(linear)] = linear
            with gpu.on(linear.device):
                _set_sum_block_and_min_rows(linear, max_rows)
        linear.min_rows, linear.sum_block = first.min_rows, first.sum_block
    return max((linear.min_rows for linear in linears), default=1)


def check_outputs(linears: Iterable[Linear]) -> None:
    """Log a warning for `dependent_on_outputs`: ranks split products by outputs, so bits would then
    depend on the number of ranks."""
    for linear in dependent_on_outputs(linears):
        log.warning(
            "exact=true: outputs of the %d -> %d product in %s differ from those of %d -> %d, "
            "so tokens and logprobs may depend on parallel.size",
            linear.in_features, linear.out_features, linear.dtype, linear.in_features, _WIDTH,
        )  # fmt: skip


@torch.inference_mode()
def dependent_on_outputs(linears: Iterable[Linear]) -> list[Linear]:
    """Products, one for each shape, in which an output's bits depend on how many others there are.
    They are compared with those of a product of 64 outputs."""
    found = []
    for linear in {_signature(linear): linear for linear in linears}.values():
        outputs = min(linear.out_features, _WIDTH)
        with gpu.on(linear.device):
            x_MI = _cancelling_rows(FEW_ROWS + 1, linear)  # fewer have the order of these
            y_MO, narrow_MO = (
                _cancelling_probe(linear, width)(x_MI)[:, :outputs]
                for width in (linear.out_features, _WIDTH)
            )
        if not torch.equal(y_MO, narrow_MO):
            found.append(linear)
    return found


@torch.inference_mode()
def _set_sum_block_and_min_rows(linear: Linear, max_rows: int) -> None:
    most = max(max_rows, FEW_ROWS + 1)  # more than `ops.panel_matmul` takes
    if linear.device.type == "cuda":
        most = min(most, _MAX_ON_A_GPU)
    probe = _cancelling_probe(linear, linear.out_features)
    x_MI = _cancelling_rows(most, linear)
    y_MO = probe(x_MI)
    if probe.sum_block:
        linear.sum_block = probe.sum_block = _sum_block(probe, x_MI[:FEW_ROWS], y_MO[:FEW_ROWS])

    affordable = most
    if linear.device.type == "cpu":
        cost = linear.in_features * linear.out_features
        affordable = max(LARGEST_PADDING, _AFFORDABLE // cost)
    order_M = _shuffled(most, linear)

    def is_tried(count: int) -> bool:
        is_library = bool(probe.sum_block) and count in _LIBRARY_ROW_COUNTS
        return count <= most and (count <= affordable or is_library)

    def differing_among(counts: tuple[int, ...]) -> set[int]:
        tried = {count: order_M[:count] for count in counts if is_tried(count)}
        return {
            count for count, rows in tried.items() if not torch.equal(probe(x_MI[rows]), y_MO[rows])
        }

    differing = differing_among(_ROW_COUNTS)
    if linear.device.type == "cpu" and torch.get_num_threads() > 1:
        with _one_thread():
            differing |= differing_among(_ONE_THREAD_ROW_COUNTS)

    least = max(differing, default=0) + 1
    if linear.device.type == "cpu" and not linear.is_packed:
        # Plain products also choose kernels by alignment, which a probe rarely shows.
        least = max(least, LARGEST_PADDING)
    if least > LARGEST_PADDING:
        raise ExactnessError(
            f"exact=true: rows of the {linear.in_features} -> {linear.out_features} product in "
            f"{linear.dtype} on {linear.device} differ between {sorted(differing)} and {most} rows"
            "; set exact=false"
        )
    linear.min_rows = least


def _sum_block(probe: Linear, x_MI: torch.Tensor, y_MO: torch.Tensor) -> int:
    """The block with which `ops.panel_matmul` gives rows ``y_MO``; 0: there is none."""
    for block in _SUM_BLOCKS:
        probe.sum_block = block
        if torch.equal(probe(x_MI), y_MO):
            return block
    return 0


@torch.inference_mode()
def _left_out_tiles(linears: Sequence[Linear], max_rows: int) -> frozenset[Tile]:
    """`disagreeing_tiles` of all shapes together, so that experts, whose grouped products are not
    tested, can leave them out too."""
    if not linears:
        return frozenset()
    shapes = {_signature(linear): linear for linear in linears}
    with gpu.on(linears[0].device):
        rows = min(max_rows, _MAX_ON_A_GPU)
        return disagreeing_tiles(
            (_cancelling_probe(linear, linear.out_features), _cancelling_rows(rows, linear))
            for linear in shapes.values()
        )


def disagreeing_tiles(products: Iterable[tuple[Linear, torch.Tensor]]) -> frozenset[Tile]:
    """All tiles but the largest set that gives each row of each product the same bits.

    Tiles of the set agree with each other and at every position of a row. The set contains a tile
    with one block of rows: experts use only those.

    ``products``: of one dtype, each with rows of input. Raises ExactnessError if there is no set.
    """
    every: Sequence[Tile] = ()
    agreeing: list[list[Tile]] = []
    for linear, x_MI in products:
        every = tiles(linear.dtype)
        agreeing = [
            like
            for some in agreeing or [list(every)]
            for like in _alike(some, linear, x_MI)
            if not TWO_BLOCK_TILES.issuperset(like)
        ]
        if not agreeing:
            raise ExactnessError(
                "exact=true: no tile of one block of rows gives a row of the "
                f"{linear.in_features} -> {linear.out_features} product in {linear.dtype} on "
                f"{linear.device} the same bits at every position; set exact=false"
            )
    largest = max(agreeing, key=len, default=[])
    left_out = frozenset(every) - frozenset(largest)
    if left_out:
        log.warning(
            "exact=true leaves out %d tiles of matrix products, which disagree with the %d in use: "
            "%s",
            len(left_out), len(largest), "; ".join(str(tile) for tile in every if tile in left_out),
        )  # fmt: skip
    return left_out


def _alike(some: list[Tile], linear: Linear, x_MI: torch.Tensor) -> list[list[Tile]]:
    """Groups of tiles with equal results. A tile whose rows depend on their position is left
    out."""
    from rollout.ops.matmul.triton import tiled_matmul

    weight_OI = linear.weight_rows(0, linear.out_features).read()
    order_M = _shuffled(len(x_MI), linear)
    found: list[tuple[torch.Tensor, list[Tile]]] = []
    for tile in some:
        y_MO = tiled_matmul(x_MI, weight_OI, linear.bias_O, tile)
        moved_MO = tiled_matmul(x_MI[order_M], weight_OI, linear.bias_O, tile)
        if not torch.equal(moved_MO, y_MO[order_M]):
            continue
        for like_MO, like in found:
            if torch.equal(y_MO, like_MO):
                like.append(tile)
                break
        else:
            found.append((y_MO, [tile]))
    return [like for _, like in found]


def _shuffled(count: int, linear: Linear) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(linear.device)


def _signature(linear: Linear) -> tuple[object, ...]:
    """The properties by which kernels are chosen; they do not depend on values."""
    return (
        linear.in_features,
        linear.out_features,
        linear.bias_O is not None,
        linear.dtype,
        linear.device,
        linear.is_packed,
        linear.row_invariant,
    )


def _cancelling_probe(linear: Linear, out_features: int) -> Linear:
    """A Linear of the same kind whose sums all cancel, so that only rounding errors are left.

    The first outputs have the same weights for any ``out_features``. Biases are about as large as
    the errors, so that it shows where they are added.

    A changed order of summation then shows in every output; with random weights the final rounding
    to bfloat16 would hide most changes. The second half of a weight row is the first half negated
    and reversed; an odd last feature is zero.
    """
    half = linear.in_features // 2
    first = torch.randn(_DISTINCT_OUTPUTS, half, generator=torch.Generator().manual_seed(1))
    odd = first.new_zeros(_DISTINCT_OUTPUTS, linear.in_features % 2)
    block = torch.cat([first, -first.flip(1), odd], dim=1).to(linear.device, linear.dtype)
    probe = Linear(
        linear.in_features,
        out_features,
        bias=linear.bias_O is not None,
        dtype=linear.dtype,
        device=linear.device,
        packing=linear.is_packed,
    )
    probe.row_invariant, probe.left_out_tiles = linear.row_invariant, linear.left_out_tiles
    probe.sum_block = linear.sum_block
    for start in range(0, out_features, _DISTINCT_OUTPUTS):
        stop = min(start + _DISTINCT_OUTPUTS, out_features)
        probe.weight_rows(start, stop).write(block[: stop - start])
    if probe.bias_O is not None:
        errors = torch.randn(_DISTINCT_OUTPUTS, generator=torch.Generator().manual_seed(3)) * 1e-6
        probe.bias_O.copy_(errors.repeat(-(-out_features // _DISTINCT_OUTPUTS))[:out_features])
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
