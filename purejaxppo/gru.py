"""A gated recurrent unit over T steps, the gradient of whose weights is one product instead of T."""

from __future__ import annotations

import functools

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


def _kept(first: Array, carry: Array) -> Array:
    return jnp.where(first[..., None], 0.0, carry)


def _mixed(inputs: Array, recalled: Array, before: Array) -> Array:
    """[..., H] the memory after a step."""
    width = 2 * before.shape[-1]
    (gates, new), (own_gates, own) = (jnp.split(x, [width], -1) for x in (inputs, recalled))
    reset, keep = jnp.split(jax.nn.sigmoid(gates + own_gates), 2, -1)
    return keep * before + (1 - keep) * tanh(new + reset * own)


def _forward(
    inputs: Array, first: Array, carry: Array, kernel: Array, bias: Array
) -> tuple[Array, tuple[Array, ...]]:
    def step(carry: Array, seen: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        inputs, first = seen
        before = _kept(first, carry)
        recalled = multiply(before, kernel) + bias
        after = _mixed(inputs, recalled, before)
        return after, (after, recalled)

    _, (memory, recalled) = jax.lax.scan(step, carry, (inputs, first))
    return memory, (inputs, first, carry, kernel, memory, recalled)


def _backward(saved: tuple[Array, ...], grad: Array) -> tuple[Array, None, Array, Array, Array]:
    """Numbers of the memory are mixed one by one, so what each step does to a gradient are factors."""
    inputs, first, carry, kernel, memory, recalled = saved
    before = _kept(first, jnp.concatenate([carry[None], memory[:-1]]))
    _, factors = jax.vjp(_mixed, inputs, recalled, before)
    of_inputs, of_recalled, of_before = factors(jnp.ones_like(memory))
    transposed = jax.lax.optimization_barrier(kernel.T)  # once, and not in every step

    def step(later: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        grad, of_recalled, of_before, first = now
        grad += later
        earlier = grad * of_before + multiply(_thrice(grad) * of_recalled, transposed)
        return _kept(first, earlier), grad

    of_carry, grad = jax.lax.scan(
        step, jnp.zeros_like(carry), (grad, of_recalled, of_before, first), reverse=True
    )
    of_recalled *= _thrice(grad)
    _, of_product = jax.vjp(functools.partial(multiply, before), kernel)
    (of_kernel,) = of_product(of_recalled)
    return of_inputs * _thrice(grad), None, of_carry, of_kernel, jnp.sum(of_recalled, (0, 1))


def _thrice(x: Array) -> Array:
    """[..., 3H] of [..., H]."""
    return jnp.concatenate([x, x, x], -1)


unroll.defvjp(_forward, _backward)
