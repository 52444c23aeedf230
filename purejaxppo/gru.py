"""A gated recurrent unit over T steps, the gradient of whose weights is one product instead of T."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from purejaxppo.activations import tanh
from purejaxppo.products import multiply


def advance(inputs: Array, first: Array, carry: Array, kernel: Array, bias: Array) -> Array:
    """[N, H] the memory after a step (Cho et al., 2014, with the reset after the product, as cuDNN has it).

    Args:
        inputs: [N, 3H] what is seen, for the gates reset and keep and the new memory.
        first: [N] bool, all before is forgotten.
        carry: [N, H] the memory before.
        kernel, bias: [H, 3H] and [3H], what is recalled of it.
    """
    before = _kept(first, carry)
    return _mixed(inputs, multiply(before, kernel) + bias, before)


@jax.custom_vjp
def unroll(inputs: Array, first: Array, carry: Array, kernel: Array, bias: Array) -> Array:
    """[T, N, H] the memory after each of T steps; inputs [T, N, 3H], first [T, N]."""
    return _forward(inputs, first, carry, kernel, bias)[0]


class _Unrolled(NamedTuple):
    """What the gradient is made of."""

    inputs: Array  # [T, N, 3H]
    recalled: Array  # [T, N, 3H]
    before: Array  # [T, N, H]
    first: Array  # [T, N]
    kernel: Array  # [H, 3H]


def _forward(
    inputs: Array, first: Array, carry: Array, kernel: Array, bias: Array
) -> tuple[Array, _Unrolled]:
    def step(carry: Array, seen: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        inputs, first = seen
        before = _kept(first, carry)
        recalled = multiply(before, kernel) + bias
        after = _mixed(inputs, recalled, before)
        return after, (after, recalled)

    _, (memory, recalled) = jax.lax.scan(step, carry, (inputs, first))
    before = _kept(first, jnp.concatenate([carry[None], memory[:-1]]))
    return memory, _Unrolled(inputs, recalled, before, first, kernel)


def _backward(of: _Unrolled, grad: Array) -> tuple[Array, None, Array, Array, Array]:
    """The gradients of inputs, carry, kernel and bias.

    Every number of a memory is mixed by itself, so that all a step does to its gradient is to multiply it.
    """
    _, factors = jax.vjp(_mixed, of.inputs, of.recalled, of.before)
    to_inputs, to_recalled, to_before = factors(jnp.ones_like(grad))
    transposed = jax.lax.optimization_barrier(of.kernel.T)  # once, and not in every step

    def step(later: Array, now: tuple[Array, tuple[Array, Array], Array]) -> tuple[Array, Array]:
        grad, (to_recalled, to_before), first = now
        grad += later
        earlier = grad * to_before + multiply(_thrice(grad) * to_recalled, transposed)
        return _kept(first, earlier), grad

    of_carry, grad = jax.lax.scan(
        step, jnp.zeros_like(grad[0]), (grad, (to_recalled, to_before), of.first), reverse=True
    )
    of_recalled = _thrice(grad) * to_recalled
    _, of_product = jax.vjp(functools.partial(multiply, of.before), of.kernel)
    (of_kernel,) = of_product(of_recalled)
    return _thrice(grad) * to_inputs, None, of_carry, of_kernel, jnp.sum(of_recalled, (0, 1))


unroll.defvjp(_forward, _backward)


def _kept(first: Array, carry: Array) -> Array:
    """[..., H] the memory, but where an episode begins."""
    return jnp.where(first[..., None], 0.0, carry)


def _mixed(inputs: Array, recalled: Array, before: Array) -> Array:
    """[..., H] the memory after a step, of what is seen and recalled [..., 3H] and the memory before."""
    width = 2 * before.shape[-1]
    (gates, new), (own_gates, own) = (jnp.split(x, [width], -1) for x in (inputs, recalled))
    reset, keep = jnp.split(jax.nn.sigmoid(gates + own_gates), 2, -1)
    return keep * before + (1 - keep) * tanh(new + reset * own)


def _thrice(x: Array) -> Array:
    """[..., 3H] of [..., H]."""
    return jnp.concatenate([x, x, x], -1)
