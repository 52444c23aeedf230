"""A gated recurrent unit over T steps, the gradient of whose weights is one product instead of T."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from purejaxppo.activations import tanh
from purejaxppo.products import multiply
from purejaxppo.scans import light_scan


def step(inputs: Array, first: Array, carry: Array, kernel: Array, bias: Array) -> Array:
    """[N, H] the memory after a step (Cho et al., 2014, with the reset after the product, as cuDNN has it).

    Args:
        inputs: [N, 3H] of what is seen, for reset gate, update gate and candidate.
        first: [N] bool, an episode begins: the memory is cleared.
        carry: [N, H] the memory before.
        kernel, bias: [H, 3H] and [3H], what it adds to them.
    """
    before = _cleared(first, carry)
    return _cell(inputs, multiply(before, kernel) + bias, before)


@jax.custom_vjp
def unroll(inputs: Array, first: Array, carry: Array, kernel: Array, bias: Array) -> Array:
    """[T, N, H] the memory after each of T steps; inputs [T, N, 3H], first [T, N]."""
    return _forward(inputs, first, carry, kernel, bias)[0]


class _Unrolled(NamedTuple):
    """What the gradient is made of."""

    inputs: Array  # [T, N, 3H]
    recurrent: Array  # [T, N, 3H]
    before: Array  # [T, N, H]
    first: Array  # [T, N]
    kernel: Array  # [H, 3H]


def _forward(
    inputs: Array, first: Array, carry: Array, kernel: Array, bias: Array
) -> tuple[Array, _Unrolled]:
    def forwards(carry: Array, seen: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        inputs, first = seen
        before = _cleared(first, carry)
        recurrent = multiply(before, kernel) + bias
        after = _cell(inputs, recurrent, before)
        return after, (after, recurrent)

    _, (memory, recurrent) = light_scan(forwards, carry, (inputs, first))
    before = _cleared(first, jnp.concatenate([carry[None], memory[:-1]]))
    return memory, _Unrolled(inputs, recurrent, before, first, kernel)


def _backward(of: _Unrolled, grad: Array) -> tuple[Array, None, Array, Array, Array]:
    """The gradients of inputs, carry, kernel and bias.

    A cell's numbers do not meet, so that all it does to a gradient is to multiply it.
    """
    _, factors = jax.vjp(_cell, of.inputs, of.recurrent, of.before)
    to_inputs, to_recurrent, to_before = factors(jnp.ones_like(grad))
    transposed = jax.lax.optimization_barrier(of.kernel.T)  # once, and not in every step

    def backwards(
        later: Array, now: tuple[Array, tuple[Array, Array], Array]
    ) -> tuple[Array, Array]:
        grad, (to_recurrent, to_before), first = now
        grad += later
        earlier = grad * to_before + multiply(_thrice(grad) * to_recurrent, transposed)
        return _cleared(first, earlier), grad

    of_carry, grad = light_scan(
        backwards,
        jnp.zeros_like(grad[0]),
        (grad, (to_recurrent, to_before), of.first),
        reverse=True,
    )
    of_recurrent = _thrice(grad) * to_recurrent
    _, of_product = jax.vjp(functools.partial(multiply, of.before), of.kernel)
    (of_kernel,) = of_product(of_recurrent)
    return _thrice(grad) * to_inputs, None, of_carry, of_kernel, jnp.sum(of_recurrent, (0, 1))


unroll.defvjp(_forward, _backward)


def _cleared(first: Array, carry: Array) -> Array:
    """[..., H] the memory, zeros where an episode begins."""
    return jnp.where(first[..., None], 0.0, carry)


def _cell(inputs: Array, recurrent: Array, before: Array) -> Array:
    """[..., H] the memory after a step; what is seen and the memory before, [..., 3H] each, add up in the gates."""
    width = 2 * before.shape[-1]
    (gates, new), (own_gates, own) = (jnp.split(x, [width], -1) for x in (inputs, recurrent))
    reset, update = jnp.split(jax.nn.sigmoid(gates + own_gates), 2, -1)
    candidate = tanh(new + reset * own)
    return update * before + (1 - update) * candidate


def _thrice(x: Array) -> Array:
    """[..., 3H] of [..., H]."""
    return jnp.concatenate([x, x, x], -1)
