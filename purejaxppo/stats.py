"""Running moments of observations and of discounted returns.

Batches are merged with Chan, Golub & LeVeque's parallel update (1979), which needs no second pass
and stays accurate for large means.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from purejaxppo.devices import mean_over_devices, num_shards
from purejaxppo.scans import light_scan
from purejaxppo.types import Scalar

# Of what `normalize` gives, here and in exported policies.
CLIP, EPSILON = 10.0, 1e-8
# Variance, of the squared mean, up to which returns of one value differ by float32's rounding alone (2.7e-11 was seen).
ROUNDING = 1e-9


class Moments(struct.PyTreeNode):
    """Mean and variance over everything seen; 0 and 1 before anything is."""

    count: Array  # [] float32
    mean: Array  # [...]
    var: Array  # [...]
    lost: Array  # [] what rounding has kept out of count, without which it would stall


class ReturnStats(struct.PyTreeNode):
    """Moments of the discounted return, and the return of each unfinished episode so far."""

    moments: Moments  # of shape []
    trace: Array  # [N]


def init_moments(shape: tuple[int, ...]) -> Moments:
    """Moments before any sample, for arrays of `shape`."""
    return Moments(jnp.zeros(()), jnp.zeros(shape), jnp.ones(shape), jnp.zeros(()))


def update_moments(moments: Moments, samples: Array, valid: Array) -> Moments:
    """Merges a batch, of all devices; samples that are not valid do not count.

    Args:
        moments: of shape [...].
        samples: [T, N, ...].
        valid: [T, N] bool.
    """
    axes = tuple(range(valid.ndim))
    mask = valid.reshape(valid.shape + (1,) * (samples.ndim - valid.ndim))
    size = mean_over_devices(jnp.sum(valid, dtype=jnp.float32))
    count = size * num_shards()
    size = jnp.maximum(size, 1e-8)
    # Deviations from the running mean keep float32 exact where the mean is far from zero.
    deviation = jnp.where(mask, samples - moments.mean, 0.0)
    shift = mean_over_devices(jnp.sum(deviation, axes)) / size
    squares = jnp.sum(jnp.where(mask, jnp.square(deviation - shift), 0.0), axes)
    var = mean_over_devices(squares) / size
    added = count + moments.lost
    total = moments.count + added
    # A GPU's x / x may fall short of 1, and what is left would weigh the distance from zero of the first batch.
    weight = jnp.where(moments.count > 0, count / jnp.maximum(total, 1.0), jnp.minimum(count, 1.0))
    return Moments(
        count=total,
        mean=moments.mean + weight * shift,
        var=(1 - weight) * moments.var + weight * (var + (1 - weight) * jnp.square(shift)),
        lost=added - (total - moments.count),
    )


def normalize(moments: Moments, samples: Array) -> Array:
    """(samples - mean) / std, clipped to +-CLIP; samples [..., *moments.shape]."""
    return jnp.clip((samples - moments.mean) * jax.lax.rsqrt(moments.var + EPSILON), -CLIP, CLIP)


def init_return_stats(num_envs: int) -> ReturnStats:
    """Return statistics before any step."""
    return ReturnStats(init_moments(()), jnp.zeros(num_envs))


def update_return_stats(
    stats: ReturnStats, reward: Array, ended: Array, valid: Array, gamma: Scalar
) -> ReturnStats:
    """Follows the discounted return through a rollout and merges it into the moments.

    Args:
        stats: with trace [N].
        reward: [T, N], clipped where rewards are, and not scaled.
        ended: [T, N] bool; the trace restarts at zero after such a step.
        valid: [T, N] bool; other steps are left out of trace and moments.
        gamma: [].
    """

    def accumulate(trace: Array, step: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        reward, ended, valid = step
        discounted = jnp.where(valid, gamma * trace + reward, trace)
        return jnp.where(ended, 0.0, discounted), discounted

    trace, returns = light_scan(accumulate, stats.trace, (reward, ended, valid))
    return ReturnStats(update_moments(stats.moments, returns, valid), trace)


def return_scale(stats: ReturnStats | None) -> Array:
    """[] what rewards are divided by: the standard deviation of the return, 1 without statistics.

    1 also while all returns have been the same but for rounding, as before the first reward of a sparse one.
    """
    if stats is None:
        return jnp.ones(())
    var, mean = stats.moments.var, stats.moments.mean
    return jnp.where(var > ROUNDING * jnp.square(mean), jnp.sqrt(var + 1e-8), 1.0)
