"""Advantages and the PPO loss, as functions of plain arrays.

Equations are those of Schulman et al. (2016), "High-dimensional continuous control using
generalized advantage estimation", and Schulman et al. (2017), "Proximal policy optimization
algorithms".
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
from flax import struct
from jax import Array

from purejaxppo.config import Hyper
from purejaxppo.devices import mean_over_devices
from purejaxppo.distributions import Distribution
from purejaxppo.scans import light_scan
from purejaxppo.types import PyTree, Scalar


class Minibatch(struct.PyTreeNode):
    """Samples of an update: what the network reads, and what the loss compares its answer with.

    [B] are samples one by one, or of sequences [B / T, T].
    """

    obs: Array  # [B, ...]
    first: Array  # [B] bool: obs begins an episode
    noise: Array  # [B, ...] for a sampled entropy
    action: Array  # [B, ...] before clipping or squashing
    log_prob: Array  # [B] under the policy that acted
    value: Array  # [B] of the value function that acted
    advantage: Array  # [B]
    target: Array  # [B] of the value function
    weight: Array  # [B] in every mean; 0: not valid, and left out of everything
    carry: PyTree = ()  # [B / T, H] the memory that sequences begin with, () without one


class LossMetrics(struct.PyTreeNode):
    """Means over a minibatch."""

    policy_loss: Array  # []
    value_loss: Array  # [] before vf_coef
    entropy: Array  # [] nats
    approx_kl: Array  # [] nats
    clip_fraction: Array  # []


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    gamma: Scalar,
    gae_lambda: Scalar,
) -> Array:
    """Generalised advantage estimates (Schulman et al., 2016, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(next_t) - V_t
    A_t     = delta_t + gamma lambda (1 - terminated_t) (1 - truncated_t) A_{t+1}

    Args:
        reward, value: [T, N].
        next_value: [T, N] of the observation the step led to, before any reset.
        terminated, truncated: [T, N] bool.
        gamma, gae_lambda: [].

    Returns:
        [T, N]; add `value` for the value function's targets.
    """
    chex.assert_rank(reward, 2, custom_message="reward")
    for name, array in (
        ("value", value),
        ("next_value", next_value),
        ("terminated", terminated),
        ("truncated", truncated),
    ):
        chex.assert_shape(array, reward.shape, custom_message=name)
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = jnp.where(terminated | truncated, 0.0, gamma * gae_lambda)

    def backwards(advantage: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, decay = step
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantages = light_scan(backwards, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    return advantages


def sample_weights(mask: Array) -> Array:
    """Weights 0 and w, w such that they are 1 on average over all devices; 0 where mask is.

    A mean with these weights may be taken of equal parts, and the mean of the parts is the same:
    a loss is made of such means, and its gradients are averaged afterwards.
    """
    share = mean_over_devices(jnp.mean(mask, dtype=jnp.float32))
    return mask / jnp.maximum(share, 1e-8)


def weighted_mean(x: Array, weight: Array) -> Array:
    """[] mean of x with `sample_weights`, on all devices; 0 where all weights are. Both of one shape."""
    return mean_over_devices(_own_mean(x, weight))


def weighted_var(x: Array, weight: Array) -> Array:
    """[] variance of x with `sample_weights`, on all devices; both of one shape."""
    return weighted_mean(jnp.square(x - weighted_mean(x, weight)), weight)


def _own_mean(x: Array, weight: Array) -> Array:
    """[] of this device's part; both of one shape."""
    return jnp.mean(jnp.where(weight > 0, weight * x, 0.0))


def normalize_advantages(advantage: Array, weight: Array) -> Array:
    """Brought to mean 0 and standard deviation 1 with `sample_weights`; both of one shape."""
    std = jnp.sqrt(weighted_var(advantage, weight))
    return (advantage - weighted_mean(advantage, weight)) / (std + 1e-8)


def ppo_loss(
    policy: Distribution, value: Array, batch: Minibatch, hyper: Hyper
) -> tuple[Array, LossMetrics]:
    """The clipped surrogate objective with value loss and entropy bonus (2017, eq. 7 and 9).

    The value loss is half the mean squared error. Where it is clipped, it is the larger of the two
    losses with and without moving V further than value_clip_eps from the value that acted.

    Args:
        policy: of the observations [B], under the current parameters.
        value: [B] likewise.
        hyper: what weighs and clips the loss in this iteration, annealing applied.

    Returns:
        [] the loss to minimise, and its parts; of several devices or equal parts of a minibatch, to
        be averaged over them.
    """
    for name in ("log_prob", "value", "advantage", "target", "weight"):
        chex.assert_shape(getattr(batch, name), value.shape, custom_message=name)
    log_prob = policy.log_prob(batch.action)
    chex.assert_shape(log_prob, value.shape, custom_message="policy.log_prob")
    # Where a step is not valid the ratio is 1 and gives no gradient, whatever was stored.
    valid = batch.weight > 0
    log_ratio = jnp.where(valid, log_prob - batch.log_prob, 0.0)
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - hyper.clip_eps, 1 + hyper.clip_eps)
    surrogate = jnp.minimum(ratio * batch.advantage, clipped_ratio * batch.advantage)
    target = jnp.where(valid, batch.target, 0.0)
    error = jnp.square(value - target)
    if hyper.value_clip_eps is not None:
        old_value = jnp.where(valid, batch.value, 0.0)
        move = jnp.clip(value - old_value, -hyper.value_clip_eps, hyper.value_clip_eps)
        error = jnp.maximum(error, jnp.square(old_value + move - target))
    metrics = LossMetrics(
        policy_loss=-_own_mean(surrogate, batch.weight),
        value_loss=0.5 * _own_mean(error, batch.weight),
        entropy=_own_mean(policy.entropy(batch.noise), batch.weight),
        approx_kl=_own_mean(ratio - 1 - log_ratio, batch.weight),
        clip_fraction=_own_mean(jnp.abs(ratio - 1) > hyper.clip_eps, batch.weight),
    )
    loss = (
        metrics.policy_loss + hyper.vf_coef * metrics.value_loss - hyper.ent_coef * metrics.entropy
    )
    return loss, metrics
