"""Small dense layers as one GPU kernel, and their gradient as another (`--dense auto|fused`).

What lies between layers never leaves the chip. XLA writes it to memory and reads it again, which is most of
what an update of many small networks does. Layers that end in a head can be fused: not a shared torso's, nor those
of a policy with two heads (`--log-std state`).

A program of a kernel has some samples of one run, in tiles. Where XLA would round what it multiplies to TF32, so
does the kernel, and then takes a tanh that is as rough.

JAX 0.11 deprecates Pallas's kernels by Triton, and has no others for GPUs before Hopper.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from purejaxppo.activations import ACTIVATIONS
from purejaxppo.products import multiply, rounds_to_tf32
from purejaxppo.types import PyTree

Weights = tuple[Array, Array]  # a layer's kernel [P, F] and bias [F]
Function = Callable[..., Array]

# Numbers of all kernels together: registers hold these, as many gradients, and a tile of each layer.
_MOST = 2 * 64 * 64
_LEAST = 16  # rows and columns of a product on a GPU
_TILE = 64  # samples at a time, of a batch that has so many
_BLOCK = 128  # samples of a run that a program of the grid has


def fused_layers(x: Array, weights: list[Weights], activation: str) -> Array:
    """[..., P] through layers to [..., F], each followed by the activation, but the last.

    As many of the last ones as fit are one kernel, unless that is the head alone.
    """
    sizes = (math.prod(map(_padded, kernel.shape)) for kernel, _ in reversed(weights))
    fit = sum(size <= _MOST for size in itertools.accumulate(sizes))
    if fit < 2:
        return _layers(x, weights, ACTIVATIONS[activation], multiply)
    first, last = weights[: len(weights) - fit], weights[len(weights) - fit :]
    x = _hidden(x, first, ACTIVATIONS[activation], multiply)
    samples = x.reshape(1, -1, x.shape[-1])  # of one run
    y: Any = _fused(samples, [(kernel[None], bias[None]) for kernel, bias in last], activation)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _layers(x: Array, weights: list[Weights], activation: Function, product: Function) -> Array:
    *hidden, (kernel, bias) = weights
    return product(_hidden(x, hidden, activation, product), kernel) + bias


def _hidden(x: Array, weights: list[Weights], activation: Function, product: Function) -> Array:
    for kernel, bias in weights:
        x = activation(product(x, kernel) + bias)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fused(x: Array, weights: list[Weights], activation: str) -> Array:
    """[R, B, P] -> [R, B, F] by weights [R, ...]."""

    def forward(x: Array, weights: list[Weights]) -> Array:
        out = jax.ShapeDtypeStruct((*x.shape[:2], weights[-1][1].shape[-1]), x.dtype)
        kernel = functools.partial(_forward_kernel, activation, x.shape[1])
        return _call(kernel, (x, weights), out, _of_run(out))

    return _of_any_runs(forward)(x, weights)


def _forward(x: Any, weights: Any, activation: str) -> tuple[Array, Any]:
    """Saves its arguments, and whether x needs a gradient, which is None where not: observations do not."""
    values = custom_vjp_primal_tree_values((x, weights))
    return _fused(*values, activation), (values, () if x.perturbed else None)


def _backward(activation: str, saved: Any, grad: Array) -> tuple[Any, list[Weights]]:
    values, by_x = saved
    return _gradients(*values, grad, activation, by_x is not None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gradients(
    x: Array, weights: list[Weights], grad: Array, activation: str, by_x: bool
) -> tuple[Any, list[Weights]]:
    """The gradients of x, None unless by_x, and of the weights, by grad [R, B, F]."""

    def backward(x: Array, weights: list[Weights], grad: Array) -> tuple[PyTree, PyTree]:
        """Those of the weights in parts, one of each block of samples."""
        blocks = _num_blocks(x.shape[1])
        parts = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct((len(w), blocks, *w.shape[1:]), w.dtype), weights
        )
        of_x = jax.ShapeDtypeStruct(x.shape, x.dtype) if by_x else None
        kernel = functools.partial(_backward_kernel, activation, x.shape[1])
        specs = jax.tree.map(_of_run, of_x), jax.tree.map(_of_block, parts)
        return _call(kernel, (x, weights, grad), (of_x, parts), specs)

    of_x, parts = _of_any_runs(backward)(x, weights, grad)
    return of_x, jax.tree.map(lambda x: jnp.sum(x, 1) if x.shape[1] > 1 else x[:, 0], parts)


def _gradients_forward(*arguments: Any) -> tuple[Any, Any]:
    return _gradients(*arguments), arguments[:3]


def _gradients_backward(activation: str, by_x: bool, saved: Any, grad: Any) -> Any:
    """Second derivatives, which XLA takes."""
    layers = functools.partial(_layers, activation=ACTIVATIONS[activation], product=multiply)

    def gradients(x: Array, weights: list[Weights], grad: Array) -> tuple[Any, list[Weights]]:
        _, pull_back = jax.vjp(jax.vmap(layers), x, weights)
        of_x, of_weights = pull_back(grad)
        return of_x if by_x else None, of_weights

    _, pull_back = jax.vjp(gradients, *saved)
    return pull_back(grad)


_gradients.defvjp(_gradients_forward, _gradients_backward)
_fused.defvjp(_forward, _backward, symbolic_zeros=True)


def _of_any_runs(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function of arrays [R, ...] that vmapped over more has them all as one axis: a grid has few."""
    function = custom_vmap(function)

    @function.def_vmap
    def _(size: int, batched: Any, *arguments: Any) -> tuple[PyTree, PyTree]:
        def fold(x: Array, is_batched: bool) -> Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = function(*jax.tree.map(fold, arguments, tuple(batched)))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return function


def _padded(size: int) -> int:
    """The power of two that a side is padded to in the kernel, with zeros."""
    return max(_LEAST, pl.next_power_of_2(size))


def _num_blocks(samples: int) -> int:
    return -(-samples // _BLOCK)


def _of_run(x: Any) -> pl.BlockSpec:
    """Of [R, ...] a program has one run's."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda run, block: (run,) + (0,) * (x.ndim - 1))


def _of_block(x: Any) -> pl.BlockSpec:
    """Of [R, blocks, ...] a program has its own."""
    return pl.BlockSpec(
        (None, None, *x.shape[2:]), lambda run, block: (run, block) + (0,) * (x.ndim - 2)
    )


def _call(kernel: Any, arguments: tuple[PyTree, ...], out: PyTree, specs: PyTree) -> Any:
    """A kernel for all blocks of samples of all runs. CPUs interpret it, which is slow."""
    runs, samples, _ = arguments[0].shape
    return pl.pallas_call(
        kernel,
        grid=(runs, _num_blocks(samples)),
        in_specs=jax.tree.map(_of_run, list(arguments)),
        out_specs=specs,
        out_shape=out,
        compiler_params=triton.CompilerParams(num_warps=_tile_of(samples) // _LEAST, num_stages=1),
        interpret=jax.default_backend() == "cpu",
    )(*arguments)


def _forward_kernel(activation: str, samples: int, x: Any, weights: Any, out: Any) -> None:
    loaded = jax.tree.map(_load, weights)

    def tile(begin: Array, rows: int, _: None) -> None:
        # Pallas knows no function with a gradient of its own, as `multiply` is.
        y = _layers(_load(x, begin, rows), loaded, _inside(activation), jnp.matmul)
        _store(out, y, begin, rows)

    _for_each_tile(samples, tile, None)


def _backward_kernel(
    activation: str, samples: int, x: Any, weights: Any, grad: Any, of_x: Any, of_weights: Any
) -> None:
    """Computes the layers again, from which little is to be read, for their gradient; of_x may be None."""
    loaded = jax.tree.map(_load, weights)
    layers = functools.partial(_layers, activation=_inside(activation), product=multiply)

    def tile(begin: Array, rows: int, total: PyTree) -> PyTree:
        _, pull_back = jax.vjp(layers, _load(x, begin, rows), loaded)
        of_tile, of_loaded = pull_back(_load(grad, begin, rows))
        if of_x is not None:
            _store(of_x, of_tile, begin, rows)
        return jax.tree.map(jnp.add, total, of_loaded)

    total = _for_each_tile(samples, tile, jax.tree.map(jnp.zeros_like, loaded))
    jax.tree.map(_store, of_weights, total)


def _inside(activation: str) -> Function:
    """The activation within a kernel."""
    return _rough_tanh if activation == "tanh" and rounds_to_tf32() else ACTIVATIONS[activation]


@jax.custom_jvp
def _rough_tanh(x: Array) -> Array:
    """Within 2 ** -11 of itself, as TF32 is."""
    return triton.approx_tanh(x)


@_rough_tanh.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = _rough_tanh(*primals)
    return y, (1 - y * y) * tangents[0]


def _tile_of(samples: int) -> int:
    """Samples at a time, with a warp for every 16: a few have a small tile."""
    return _TILE if samples >= _TILE else _LEAST


def _for_each_tile(samples: int, tile: Callable[[Array, int, Any], Any], carry: PyTree) -> PyTree:
    """A loop over the tiles of this program's block: tile(begin, rows, carry)."""
    rows = _tile_of(samples)
    first, tiles = pl.program_id(1) * _BLOCK, -(-min(samples, _BLOCK) // rows)
    return jax.lax.fori_loop(0, tiles, lambda i, carry: tile(first + i * rows, rows, carry), carry)


def _window(ref: Any, begin: Array | None, rows: int | None) -> tuple[Any, Array]:
    """An array padded, or a tile of it, and a mask of what is inside the array."""
    sizes = tuple(map(_padded, ref.shape))
    starts: list[Any] = [0] * len(sizes)
    if rows is not None:
        sizes, starts[0] = (rows, *sizes[1:]), begin
    there = [
        start + jax.lax.broadcasted_iota(jnp.int32, sizes, axis) < ref.shape[axis]
        for axis, start in enumerate(starts)
    ]
    index = tuple(pl.ds(start, size) for start, size in zip(starts, sizes, strict=True))
    return ref.at[index], functools.reduce(jnp.logical_and, there)


def _load(ref: Any, begin: Array | None = None, rows: int | None = None) -> Array:
    window, there = _window(ref, begin, rows)
    return triton.load(window, mask=there, other=0.0)


def _store(ref: Any, value: Array, begin: Array | None = None, rows: int | None = None) -> None:
    window, there = _window(ref, begin, rows)
    triton.store(window, value, mask=there)
