"""`jax.lax.scan` in fewer kernels: an accelerator launches a small one for longer than it computes it.

On CPUs, where a kernel costs little, nothing is packed or unrolled: XLA would compute more than once what is
packed and read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import Array

from purejaxppo.types import PyTree

Step = Callable[[Any, Any], tuple[Any, Any]]
Unpack = Callable[[PyTree], PyTree]

_UNROLL = 16  # steps of a light scan that are a few kernels together
_WORDS = ("bool", "int32", "uint32", "float32")  # what fits a word


def light_scan(step: Step, carry: PyTree, inputs: PyTree, reverse: bool = False) -> Any:
    """Of few operations a step: several steps at a time."""
    unroll = 1 if jax.default_backend() == "cpu" else _UNROLL
    return jax.lax.scan(step, carry, inputs, reverse=reverse, unroll=unroll)


def packed_scan(step: Step, carry: PyTree, inputs: PyTree, shape: tuple[int, ...] = ()) -> Any:
    """With the outputs of a shape written as one array, where each would be a kernel.

    Those that nobody reads are computed all the same.
    """
    unpacks: list[Unpack] = []  # as known once step has been traced

    def packed_step(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        carry, outputs = step(carry, x)
        packed, unpack = _pack(outputs, shape)
        unpacks.append(unpack)
        return carry, packed

    carry, (words, others) = jax.lax.scan(packed_step, carry, inputs)
    return carry, unpacks[-1]((jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), words), others))


def vector_scan(step: Step, carry: PyTree, inputs: PyTree, size: int) -> Any:
    """Over steps of N environments: what is [N] is one array in the outputs, and between the steps.

    Between steps arrays of more than two dimensions are rows, on all devices, one of each environment: XLA
    for CPUs computes [N, 400] in vectors and [N, 10, 10, 4] number by number, and is slow with [1, N * 400].

    Args:
        size: N.
    """
    packed, unpack = _pack(carry, (size,))
    shapes = [x.shape for x in packed[1]]

    def as_rows(packed: PyTree) -> PyTree:
        words, others = packed
        return words, [_as_rows(x, size) for x in others]

    def from_rows(packed: PyTree) -> PyTree:
        words, rows = packed
        others = [x.reshape(shape) for x, shape in zip(rows, shapes, strict=True)]
        return unpack((words, others))

    def step_of_rows(rows: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        before = from_rows(rows)
        after, outputs = step(before, x)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, before)  # as a word it could be either
        return as_rows(_pack(after, (size,))[0]), outputs

    rows, outputs = packed_scan(step_of_rows, as_rows(packed), inputs, (size,))
    return from_rows(rows), outputs


def _pack(tree: PyTree, shape: tuple[int, ...]) -> tuple[PyTree, Unpack]:
    """([K, *shape] of a tree's leaves with this shape, the others), and what makes the tree of that again."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = () if jax.default_backend() == "cpu" else _WORDS
    dtypes = [x.dtype if x.shape == shape and str(x.dtype) in kinds else None for x in leaves]
    pairs = list(zip(leaves, dtypes, strict=True))
    small = [_as_word(x) for x, dtype in pairs if dtype is not None]

    def unpack(packed: PyTree) -> PyTree:
        words, others = map(iter, packed)
        return treedef.unflatten(
            next(others) if dtype is None else _from_word(next(words), dtype) for dtype in dtypes
        )

    others = [x for x, dtype in pairs if dtype is None]
    return (jnp.stack(small) if small else (), others), unpack


def _as_rows(x: Array, size: int) -> Array:
    """[size, ...] as [size, F], and [K, size, ...] as [K * size, F]."""
    if x.ndim <= 2:
        return x
    batch = 1 if len(x) == size else 2
    return x.reshape(math.prod(x.shape[:batch]), math.prod(x.shape[batch:]))


def _as_word(x: Array) -> Array:
    return x.astype("uint32") if x.dtype == "bool" else jax.lax.bitcast_convert_type(x, "uint32")


def _from_word(x: Array, dtype: Any) -> Array:
    return x > 0 if dtype == "bool" else jax.lax.bitcast_convert_type(x, dtype)
