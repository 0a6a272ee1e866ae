"""Triton's interpreter as the tests run it: products in one order, the language patched once.

Triton's own `tl.dot` there is numpy's product, and BLAS on some processors adds a row's terms in an
order that depends on the row's place in the tile; tensor cores have one order. And it patches all
of `triton.language` at each launch and each call of a device function, which is most of a small
kernel's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def quick_interpreter() -> Iterator[None]:
    patch_language = interpreter._patch_lang
    scopes: dict[int, Any] = {}  # by a module's globals, in which its kernels find the language

    def patch_once(function: Any) -> SimpleNamespace:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch_language(function)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = (
        np.moveaxis(x.data.astype(d.data.dtype), axis, 0) for x, axis in ((a, 1), (b, 0))
    )
    total = np.zeros_like(d.data)
    for column, row in zip(left, right, strict=True):
        total += column[:, None] * row[None, :]
    return TensorHandle(total + d.data, d.dtype.scalar)
