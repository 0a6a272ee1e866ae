"""The hyperbolic tangent in kernels of a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32: near zero by an odd polynomial (Cephes), else by exp."""
    square = x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    small = x + x * square * p
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))
