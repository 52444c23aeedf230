"""The matrix product of all layers, as CPUs take it and its gradient fast."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

# Up to which products are made of vectors.
_FEW_OUTPUTS = 4
_FEW_INPUTS = 8


@jax.custom_vjp
def multiply(x: Array, kernel: Array) -> Array:
    """[..., P] @ [P, F], of which CPUs take the gradient fast.

    With few outputs, as of a policy's head, a CPU is faster with a product of x and a vector for each,
    with few inputs, as of a first layer, with a sum of vectors: it is fused with what comes next.
    """
    inputs, outputs = kernel.shape
    if _on_cpu() and outputs <= _FEW_OUTPUTS:
        columns = jax.lax.split(kernel, (1,) * outputs, axis=1)
        return jnp.concatenate([x @ column for column in columns], axis=-1)
    if _on_cpu() and inputs <= _FEW_INPUTS:
        return _sum_of_vectors(x, kernel)
    return x @ kernel


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return multiply(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    """The gradients x.T @ grad of the kernel, and grad @ kernel.T of x.

    On CPUs the smaller factor is transposed into a copy first: XLA would multiply x's transpose as it
    lies, at half the speed, and a large kernel's at a fifth.
    """
    x, kernel = saved
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    if not _on_cpu():
        of_kernel = rows.T @ grads
    elif rows.size <= 2 * grads.size + kernel.size:
        of_kernel = _barrier(rows.T) @ grads
    else:
        of_kernel = _barrier(_barrier(grads.T) @ rows).T
    if _on_cpu() and kernel.shape[-1] <= _FEW_OUTPUTS:
        of_x = _sum_of_vectors(grad, kernel.T)
    elif _on_cpu() and kernel.size > rows.size + grads.size:
        of_x = _barrier(kernel @ _barrier(grads.T)).T.reshape(x.shape)
    else:
        of_x = grad @ kernel.T
    return of_x, of_kernel


multiply.defvjp(_forward, _backward)

_barrier = jax.lax.optimization_barrier


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _sum_of_vectors(x: Array, kernel: Array) -> Array:
    """[..., P] @ [P, F] with small P, of outer products, which XLA multiplies number by number."""
    ones = (1,) * len(kernel)
    columns, rows = jax.lax.split(x, ones, axis=x.ndim - 1), jax.lax.split(kernel, ones)
    return functools.reduce(jnp.add, [a @ b for a, b in zip(columns, rows, strict=True)])
