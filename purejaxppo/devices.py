"""A run on several devices: its environments are divided, and all else is done by every device.

The algorithm is written for the environments of one device. Where it must know about the others it
says so through these functions, which do nothing where a run has a device for itself.
"""

from __future__ import annotations

import jax
from jax import Array

from purejaxppo.types import PyTree

AXIS = "purejaxppo.environments"  # of the mesh, see train.py; no name that a user gives to vmap


def num_shards() -> int:
    """Devices that share the environments of a run, where this is traced."""
    try:
        return jax.lax.axis_size(AXIS)
    except NameError:
        return 1


def mean_over_devices(tree: PyTree) -> PyTree:
    """The mean over the devices of a run: of gradients, of the KL divergence, and of sums."""
    return tree if num_shards() == 1 else jax.lax.pmean(tree, AXIS)


def own_share(x: Array, axis: int) -> Array:
    """The part [..., N, ...] for this device's environments of an array for those of all.

    Random numbers are drawn for all, so that they do not depend on how many devices there are.
    """
    if num_shards() == 1:
        return x
    size = x.shape[axis] // num_shards()
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, axis)


def split_keys(key: Array, num_envs: int, common: int = 1) -> tuple[Array, Array]:
    """Keys [common] that every device has, and [N] for its own environments; consumes key.

    All in one call of the generator, which takes 25 ms to trace and compile.
    """
    keys = jax.random.split(key, common + num_envs * num_shards())
    return keys[:common], own_share(keys[common:], axis=0)
