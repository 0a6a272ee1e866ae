"""The interpreter's `tl.dot` with sums in one order, as the tensor cores' are.

Triton's own is numpy's product, and BLAS on some processors adds a row's terms in an order that
depends on the row's place in the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def ordered_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        yield


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = (
        np.moveaxis(x.data.astype(d.data.dtype), axis, 0) for x, axis in ((a, 1), (b, 0))
    )
    total = np.zeros_like(d.data)
    for column, row in zip(left, right, strict=True):
        total += column[:, None] * row[None, :]
    return TensorHandle(total + d.data, d.dtype.scalar)
