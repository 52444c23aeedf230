"""The second half of an iteration: epochs of minibatches, each a step of the optimiser."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from purejaxppo.agent import (
    LEARNING_RATES,
    OptState,
    adapt_learning_rate,
    adapted_rates,
    apply_gradients,
    as_vector,
)
from purejaxppo.config import Config, Hyper
from purejaxppo.devices import mean_over_devices
from purejaxppo.losses import (
    LossMetrics,
    Minibatch,
    normalize_advantages,
    ppo_loss,
    sample_weights,
)
from purejaxppo.rollouts import Setup, advantages, as_samples, num_microbatches, values
from purejaxppo.scans import packed_scan
from purejaxppo.types import PyTree, Rollout, Scalar, TrainState


class Learner(struct.PyTreeNode):
    """What an update changes."""

    params: PyTree
    opt_state: OptState
    stopped: Array  # [] bool: target_kl was exceeded, nothing more changes in this iteration


class UpdateMetrics(struct.PyTreeNode):
    """One minibatch's update in numbers."""

    losses: LossMetrics  # of this device's part
    grad_norm: Array  # [] before clipping
    learning_rate: Scalar  # [] the policy's
    applied: Array  # [] bool, False: skipped because of target_kl


def update(
    setup: Setup,
    state: TrainState,
    data: Rollout,
    advantage: Array,
    hyper: Hyper,
    order: Array,
) -> tuple[Learner, UpdateMetrics]:
    """Epochs of minibatches. Metrics are [updates].

    Args:
        advantage: [T, N].
        hyper: of this iteration, see `annealed`.
        order: [epochs, ...] from `draw`.
    """
    config, steps = setup.config, data.transitions
    if config.recompute_advantages:
        epoch = functools.partial(_epoch_anew, setup, state, data, hyper)
    else:
        samples = _samples(config, data, advantage, advantage + steps.value)
        epoch = functools.partial(_epoch, setup, state, samples, hyper)
    learner = Learner(state.params, state.opt_state, jnp.zeros((), bool))
    learner, metrics = packed_scan(epoch, learner, order, (config.num_minibatches,))
    return learner, jax.tree.map(jnp.ravel, metrics)


def _samples(config: Config, data: Rollout, advantage: Array, target: Array) -> Minibatch:
    """What minibatches are picked from, see `as_samples`; advantage and target are [T, N]."""
    steps = data.transitions
    weight = sample_weights(steps.valid)
    if config.normalize_advantages == "batch":
        advantage = normalize_advantages(advantage, weight)
    samples = Minibatch(
        obs=steps.obs,
        first=steps.first,
        noise=steps.noise,
        action=steps.action,
        log_prob=steps.log_prob,
        value=steps.value,
        advantage=advantage,
        target=target,
        weight=weight,
    )
    return as_samples(config, samples).replace(carry=data.carry)


def _epoch_anew(
    setup: Setup, state: TrainState, data: Rollout, hyper: Hyper, learner: Learner, order: Array
) -> tuple[Learner, UpdateMetrics]:
    """An epoch with advantages and targets by the values it begins with.

    Andrychowicz et al. (2021), "What matters for on-policy deep actor-critic methods?", 3.5. Values
    are clipped around those of the rollout, as ratios are.
    """
    now = state.replace(params=learner.params)
    value = values(setup, now, data.transitions)
    revalued = data.replace(transitions=data.transitions.replace(value=value))
    advantage = advantages(setup, now, revalued, hyper)
    samples = _samples(setup.config, data, advantage, advantage + value)
    return _epoch(setup, state, samples, hyper, learner, order)


def _epoch(
    setup: Setup,
    state: TrainState,
    samples: Minibatch,
    hyper: Hyper,
    learner: Learner,
    order: Array,
) -> tuple[Learner, UpdateMetrics]:
    """One pass over the samples, in an order [T * N], or of sequences [N]. Metrics are [minibatches].

    Weights and advantages are made for all minibatches at once, and are those of each by itself.
    """
    index = order.reshape(setup.config.num_minibatches, -1)
    advantage, valid = samples.advantage[index], samples.weight[index] > 0
    weight = jax.vmap(sample_weights)(valid)
    if setup.config.normalize_advantages == "minibatch":
        advantage = jax.vmap(normalize_advantages)(advantage, weight)
    step = functools.partial(_update_minibatch, setup, state, samples, hyper)
    return packed_scan(step, learner, (index, advantage, weight))


def _update_minibatch(
    setup: Setup,
    state: TrainState,
    samples: Minibatch,
    hyper: Hyper,
    learner: Learner,
    picked: tuple[Array, Array, Array],
) -> tuple[Learner, UpdateMetrics]:
    """One step of the optimiser, on the samples that are picked, with these advantages and weights."""
    gradients = functools.partial(_gradients, setup, state, samples, learner.params, hyper)
    grads, losses = mean_over_parts(gradients, picked, num_microbatches(setup))
    # The KL divergence only where it is read: XLA sends arrays between CPU devices one by one.
    grads, approx_kl = mean_over_devices((grads, losses.approx_kl))
    opt_state = adapt_learning_rate(hyper, learner.opt_state, approx_kl)
    adapted = adapted_rates(hyper, opt_state)
    params, opt_state, norm = apply_gradients(adapted, learner.params, opt_state, grads)
    stepped = Learner(params, opt_state, learner.stopped)
    if hyper.target_kl is not None:
        stopped = learner.stopped | (approx_kl > hyper.target_kl)
        stepped = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), learner, stepped)
        stepped = stepped.replace(stopped=stopped)
    return stepped, UpdateMetrics(
        losses=losses,
        grad_norm=norm,
        learning_rate=adapted.learning_rate,
        applied=~stepped.stopped,
    )


def mean_over_parts(function: Callable[[PyTree], PyTree], batch: PyTree, parts: int) -> PyTree:
    """The mean of what a function gives for equal parts of a batch [B, ...], one after another."""
    if parts == 1:
        return function(batch)
    batches = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], batches))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, function(part)), None), zeros, batches
    )
    return jax.tree.map(lambda x: x / parts, total)


def _gradients(
    setup: Setup,
    state: TrainState,
    samples: Minibatch,
    params: PyTree,
    hyper: Hyper,
    picked: tuple[Array, Array, Array],
) -> tuple[Array, LossMetrics]:
    """As a vector [P], see `_update_minibatch`."""
    index, advantage, weight = picked
    batch = jax.tree.map(lambda x: x[index], samples)
    batch = batch.replace(advantage=advantage, weight=weight)
    grads, losses = jax.grad(_loss, has_aux=True)(params, setup, state, batch, hyper)
    return as_vector(grads), losses


def _loss(
    params: PyTree, setup: Setup, state: TrainState, batch: Minibatch, hyper: Hyper
) -> tuple[Array, LossMetrics]:
    output = setup.agent.apply(params, state.obs_stats, batch.obs, batch.carry, batch.first)
    return ppo_loss(output.policy, output.value, batch, hyper)


def annealed(config: Config, hyper: Hyper, remaining: Array) -> Hyper:
    """The hyperparameters of an iteration; remaining [] falls from 1 to 0."""
    names = LEARNING_RATES * config.anneal_learning_rate
    names += ("clip_eps", "value_clip_eps") * config.anneal_clip_eps
    names += ("ent_coef",) * config.anneal_ent_coef
    return hyper.scaled(remaining, *names)
