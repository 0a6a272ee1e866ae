"""Triton's interpreter as the tests run it: products in one order, and less done again and again.

Triton's own `tl.dot` there is numpy's product, and BLAS on some processors adds a row's terms in an
order that depends on the row's place in the tile; tensor cores have one order. And most of a small
kernel's time went to patching all of `triton.language` at each launch and each call of a device
function, and to making the types of all tensors anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from triton import language as tl
from triton.language.semantic import TritonSemantic
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
        patch.setattr(tl.block_type, "__init__", _types_made_once())
        patch.setattr(tl.tensor, "__init__", _tensors_of_known_types())
        patch.setattr(interpreter, "_get_np_dtype", _numpy_dtypes_found_once())
        patch.setattr(TritonSemantic, "broadcast_impl_value", _alike_as_they_are())
        # A check of sums and products of integers for overflow, which no GPU makes.
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


def _types_made_once() -> Callable[..., None]:
    """A constructor of block types that computes the attributes of equal types once. Types of one
    shape have the same object as their shape."""
    initialize = tl.block_type.__init__
    made: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def quick(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = element_ty.name, sizes
        if key not in made:
            initialize(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            made[key] = dict(self.__dict__)
        self.__dict__.update(made[key])

    return quick


def _tensors_of_known_types() -> Callable[..., None]:
    """A constructor of tensors that computes the attributes a type decides once for each type."""
    initialize = tl.tensor.__init__
    made: dict[str, dict[str, Any]] = {}  # by a type's name

    def quick(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
        if type.name not in made:
            initialize(self, handle, type)
            made[type.name] = dict(self.__dict__)
        self.__dict__.update(made[type.name], handle=handle, type=type)

    return quick


def _numpy_dtypes_found_once() -> Callable[[tl.dtype], np.dtype]:
    """Triton's table of numpy's dtypes, made once; Triton makes it anew in each call."""
    find = interpreter._get_np_dtype
    found: dict[str, np.dtype] = {}

    def quick(dtype: tl.dtype) -> np.dtype:
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    return quick


def _alike_as_they_are() -> Callable[..., tuple[tl.tensor, tl.tensor]]:
    """A broadcast that returns operands of one shape as they are."""
    broadcast = TritonSemantic.broadcast_impl_value

    def quick(self: Any, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        ours, theirs = getattr(left.type, "shape", None), getattr(right.type, "shape", None)
        return (left, right) if ours is theirs else broadcast(self, left, right)

    return quick


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    total = ordered_product(a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
    return TensorHandle(total + d.data, d.dtype.scalar)


def ordered_product(left_MK: np.ndarray, right_KN: np.ndarray) -> np.ndarray:
    """Each element's terms are added up one after another: the features come first in memory, so
    that numpy's innermost loop goes along rows or outputs."""
    left_KM = np.ascontiguousarray(left_MK.T)
    return np.einsum("km,kn->mn", left_KM, np.ascontiguousarray(right_KN), optimize=False)
