"""The matrix product of all layers, as CPUs take it and its gradient fast."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from purejaxppo.cpu import has_avx512

# Up to which products are made of vectors.
_FEW_OUTPUTS = 4
_FEW_INPUTS = 8
# What `jax_default_matmul_precision` may be for products of TF32.
_TF32 = (None, "default", "bfloat16", "high", "tensorfloat32", "TF32_TF32_F32")


@jax.custom_vjp
def multiply(x: Array, kernel: Array) -> Array:
    """[..., P] @ [P, F], of which CPUs take the gradient fast."""
    return _product(x, kernel)


def _product(x: Array, kernel: Array) -> Array:
    """With few outputs, as of a policy's head, a CPU is faster with a product of x and a vector for each.

    With few inputs, as of a first layer, with a sum of vectors: it is fused with what comes next.
    """
    inputs, outputs = kernel.shape
    if _on_cpu() and outputs <= _FEW_OUTPUTS:
        columns = jax.lax.split(kernel, (1,) * outputs, axis=1)
        return jnp.concatenate([x @ column for column in columns], axis=-1)
    if _on_cpu() and inputs <= _FEW_INPUTS:
        return _sum_of_vectors(x, kernel)
    return x @ kernel


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    """The gradients grad @ kernel.T of x, and x.T @ grad of the kernel."""
    x, kernel = saved
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    if not _on_cpu():
        return grad @ kernel.T, rows.T @ grads
    return _of_x(grads, kernel).reshape(x.shape), _of_kernel(rows, grads)


def _of_kernel(x: Array, grad: Array) -> Array:
    """[P, F] x.T @ grad on CPUs, of x [B, P] and grad [B, F].

    The smaller of both is transposed into a copy first: XLA would multiply x's transpose as it lies, at
    half the speed. With AVX-512 a smaller grad, unless of few outputs, needs none: oneDNN, which takes
    it as it lies, is faster than what multiplies copies.
    """
    inputs, outputs = x.shape[-1], grad.shape[-1]
    if x.size <= 2 * grad.size + inputs * outputs:
        return _barrier(x.T) @ grad
    if outputs > _FEW_OUTPUTS and has_avx512():
        return _barrier(grad.T @ x).T
    return _barrier(_barrier(grad.T) @ x).T


def _of_x(grad: Array, kernel: Array) -> Array:
    """[B, P] grad @ kernel.T on CPUs, of grad [B, F] and the kernel [P, F].

    XLA multiplies a large kernel's transpose at a fifth of the speed, so grad's is taken there.
    """
    inputs, outputs = kernel.shape
    if outputs <= _FEW_OUTPUTS:
        return _sum_of_vectors(grad, kernel.T)
    if kernel.size > len(grad) * (inputs + outputs):
        return _barrier(kernel @ _barrier(grad.T)).T
    return grad @ kernel.T


multiply.defvjp(_forward, _backward)

_barrier = jax.lax.optimization_barrier


def rounds_to_tf32() -> bool:
    """Whether products of float32 are of TF32, with 10 bits: by NVIDIA's GPUs from Ampere on, unless more are asked for."""
    device: Any = jax.devices()[0]
    if not device.device_kind.startswith("NVIDIA") or float(device.compute_capability) < 8:
        return False
    return jax.config.values["jax_default_matmul_precision"] in _TF32


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _sum_of_vectors(x: Array, kernel: Array) -> Array:
    """[..., P] @ [P, F] with small P, of outer products, which XLA multiplies number by number."""
    ones = (1,) * len(kernel)
    columns, rows = jax.lax.split(x, ones, axis=x.ndim - 1), jax.lax.split(kernel, ones)
    return functools.reduce(jnp.add, [a @ b for a, b in zip(columns, rows, strict=True)])
