"""Permutations of the samples without sorting, from a few random numbers each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# In 200,000 permutations of 2 to 32 samples, pairs come in every order and minibatch as often as by chance
# after eight rounds, and not after four.
_NUM_ROUNDS = 8
BITS = 2 * _NUM_ROUNDS  # random numbers that a permutation takes


def permutations(bits: Array, size: int) -> Array:
    """[E, size] uint32, E permutations of 0 ... size - 1, from uniform uint32 [E, BITS].

    Rounds of an odd factor, a summand and an xor of the low half with the high one, modulo the power
    of two that holds the size: each can be undone, so no two numbers become one. Those that come out
    too large go through all rounds again until they fit (Black & Rogaway, 2002, cycle walking).
    """
    width = max((size - 1).bit_length(), 1)
    mask = np.uint32((1 << width) - 1)
    keys = jnp.unstack(bits[..., None], axis=1)  # [E, 1] each

    def mix(x: Array) -> Array:
        for factor, summand in zip(keys[::2], keys[1::2], strict=True):
            x = (x * (factor | 1) + summand) & mask
            x ^= x >> (width + 1) // 2
        return x

    def walk(state: tuple[Array, Array]) -> tuple[Array, Array]:
        x, too_large = state
        x = jnp.where(too_large, mix(x), x)
        return x, x >= size

    start = jnp.broadcast_to(jnp.arange(size, dtype=jnp.uint32), (len(bits), size))
    if size == 1 << width:
        return mix(start)
    all_of_them = jnp.ones(start.shape, bool)
    order, _ = jax.lax.while_loop(lambda state: jnp.any(state[1]), walk, (start, all_of_them))
    return order
