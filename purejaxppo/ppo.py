"""Proximal policy optimisation (Schulman et al., 2017): the algorithm and nothing else.

`init` makes a `TrainState`, `iterate` is one iteration: rollout, advantages, update, statistics.
Both are pure, so they compile, scan and vmap. Keys are derived by name from the run's key and the
iteration, and never carried.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from purejaxppo import stats
from purejaxppo.agent import (
    Agent,
    OptState,
    adapt_learning_rate,
    apply_gradients,
    init_optimizer,
    learning_rate_scale,
)
from purejaxppo.config import Config, Hyper
from purejaxppo.devices import mean_over_devices, num_shards, own_share, split_keys
from purejaxppo.distributions import noise_from_bits, num_outputs
from purejaxppo.envs.base import VectorEnvironment, finite_start
from purejaxppo.losses import (
    Coefficients,
    LossMetrics,
    Minibatch,
    gae,
    normalize_advantages,
    ppo_loss,
    sample_weights,
    weighted_mean,
    weighted_var,
)
from purejaxppo.shuffles import BITS, permutations
from purejaxppo.types import Episode, Metrics, PyTree, Rollout, Scalar, TrainState, Transition

# Bytes of activations that a CPU multiplies fastest at a time.
_CACHED = 48 * 2**20


class Setup(NamedTuple):
    """What a training is made of. Static: none of it holds arrays that change."""

    config: Config
    env: VectorEnvironment
    agent: Agent


class Draws(NamedTuple):
    """The random numbers of an iteration."""

    key_pool: Array  # [P, N] for the start states
    key_env: Array  # [T, N] a key for every step of every environment
    noise: Array  # [T, N, ...] for the actions
    order: Array  # [epochs, T * N] uint32, permutations of the samples; [epochs, N] for sequences


class Learner(struct.PyTreeNode):
    """What an update changes."""

    params: PyTree
    opt_state: OptState
    stopped: Array  # [] bool: target_kl was exceeded, nothing more changes in this iteration


class UpdateMetrics(struct.PyTreeNode):
    """One minibatch's update in numbers."""

    losses: LossMetrics
    grad_norm: Array  # [] before clipping
    learning_rate: Array  # [] the policy's
    applied: Array  # [] bool, False: skipped because of target_kl


class Actor(struct.PyTreeNode):
    """What a step of the rollout changes."""

    env_state: PyTree
    first: Array  # [N] bool
    carry: PyTree
    final_obs: Array  # [K, N, ...]


def init(setup: Setup, key: Array, hyper: Hyper) -> TrainState:
    """The state of a run before its first iteration; consumes key."""
    config, env, agent = setup
    (key, key_params), key_env = split_keys(key, env.num_envs, common=2)
    params = agent.init(key_params, hyper)
    return TrainState(
        params=params,
        opt_state=init_optimizer(hyper, params),
        obs_stats=stats.init_moments(env.observation_space.shape)
        if config.normalize_observations
        else None,
        return_stats=stats.init_return_stats(env.num_envs) if config.normalize_rewards else None,
        env_state=env.reset(key_env),
        first=jnp.ones(env.num_envs, bool),
        carry=agent.init_carry(env.num_envs),
        key=key,
        iteration=jnp.zeros((), jnp.int32),
    )


def iterate(
    setup: Setup, state: TrainState, hyper: Hyper, iterations: Scalar
) -> tuple[TrainState, Metrics]:
    """One iteration of PPO.

    Statistics stay as they are until the loss has been taken, so the policy that is improved is the
    one that acted.

    Args:
        hyper: of scalars.
        iterations: [] how many there are in all, over which annealing runs.
    """
    remaining = 1.0 - state.iteration / iterations
    draws = draw(setup, jax.random.fold_in(state.key, state.iteration))
    state, data = rollout(setup, state, draws)
    advantage = advantages(setup, state, data, hyper)
    learner, updates = update(setup, state, data, advantage, hyper, remaining, draws.order)
    metrics = summarize(state, data, advantage, updates, hyper)
    state = update_statistics(state, data.transitions, hyper)
    return state.replace(
        params=learner.params, opt_state=learner.opt_state, iteration=state.iteration + 1
    ), metrics


def truncation_window(env: VectorEnvironment) -> int | None:
    """W such that no environment truncates twice within W steps, however a rollout begins.

    One slot for final observations in every window then holds them all. None: none is needed.
    """
    if env.external:
        return None  # a final observation is acted on like any other
    return 1 if env.may_truncate else env.max_episode_steps


def draw(setup: Setup, key: Array) -> Draws:
    """Every random number of an iteration in one batch; consumes key.

    Each call of the generator takes 25 ms to trace and compile, and inside a scan its time too.
    """
    config, env, _ = setup
    width = jax.random.key_data(key).size  # words of a key
    num_envs = env.num_envs * num_shards()
    rows = 1 if config.minibatches == "sequences" else config.num_steps
    shapes = [
        (env.pool_size, num_envs, width),
        (config.num_steps, num_envs, width),
        (config.num_steps, num_envs, num_outputs(env.action_space)),
        (config.update_epochs * BITS, num_shards()),
    ]
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    parts = jnp.split(jax.random.bits(key, (ends[-1],)), ends[:-1])
    each = (x.reshape(shape) for x, shape in zip(parts, shapes, strict=True))
    pool, steps, noise, shuffles = (own_share(x, axis=1) for x in each)
    as_key = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key))
    return Draws(
        as_key(pool),
        as_key(steps),
        noise_from_bits(noise, env.action_space),
        permutations(shuffles.reshape(-1, BITS), rows * env.num_envs),
    )


def rollout(setup: Setup, state: TrainState, draws: Draws) -> tuple[TrainState, Rollout]:
    """T steps of the policy in N environments."""
    config, env, _ = setup
    steps = (jnp.arange(config.num_steps), draws.noise, draws.key_env)
    obs = state.env_state.obs
    window = truncation_window(env)
    slots = -(-config.num_steps // window) if window else 0
    actor = Actor(
        env_state=finite_start(env.begin_rollout(draws.key_pool, state.env_state)),
        first=state.first,
        carry=state.carry,
        final_obs=jnp.zeros((slots, *obs.shape), obs.dtype),
    )
    act = functools.partial(_act, setup, state.params, state.obs_stats)
    actor, (transitions, episodes) = jax.lax.scan(act, actor, steps)
    env_state = env.end_rollout(actor.env_state)
    if not setup.agent.network.shared_torso:
        transitions = transitions.replace(value=_values(setup, state, transitions))
    state = state.replace(env_state=env_state, first=actor.first, carry=actor.carry)
    return state, Rollout(transitions, episodes, actor.final_obs)


def _act(
    setup: Setup,
    params: PyTree,
    obs_stats: stats.Moments | None,
    actor: Actor,
    step: tuple[Array, Array, Array],
) -> tuple[Actor, tuple[Transition, Episode]]:
    """One step of the rollout; step is (t [], noise [N, ...], key [N])."""
    _, env, agent = setup
    t, noise, key = step
    obs, batch = actor.env_state.obs, (env.num_envs,)
    output = agent.apply(params, obs_stats, obs, actor.carry, actor.first)
    chex.assert_shape(output.value, batch, custom_message="value")
    action = output.policy.sample(noise)
    log_prob = output.policy.log_prob(action)
    chex.assert_shape(log_prob, batch, custom_message="log_prob")
    env_state, timestep, episode = env.step(key, actor.env_state, output.policy.to_env(action))
    chex.assert_shape(timestep.reward, batch, custom_message="reward")
    chex.assert_shape(timestep.terminated, batch, custom_message="terminated")
    chex.assert_shape(timestep.truncated, batch, custom_message="truncated")
    valid = jnp.ones(batch, bool) if timestep.valid is None else timestep.valid
    chex.assert_shape(valid, batch, custom_message="valid")
    transition = Transition(
        obs=obs,
        first=actor.first,
        action=action,
        noise=noise,
        log_prob=log_prob,
        value=output.value,
        reward=timestep.reward,
        terminated=timestep.terminated,
        truncated=timestep.truncated,
        valid=valid,
    )
    final_obs = actor.final_obs
    if window := truncation_window(env):
        slot = t // window
        mask = timestep.truncated.reshape(batch + (1,) * (obs.ndim - 1))
        final_obs = final_obs.at[slot].set(jnp.where(mask, timestep.obs, final_obs[slot]))
    return Actor(env_state, episode.ended, output.carry, final_obs), (transition, episode)


def _values(setup: Setup, state: TrainState, steps: Transition) -> Array:
    """[T, N] of a value network that has nothing in common with the policy's, after the rollout.

    A few large products in place of small ones in every step, which XLA leaves out as nothing reads them.
    As many observations at a time as an update has, so that this takes no more memory.
    """
    parts = [x.reshape(_num_parts(setup), -1, *x.shape[2:]) for x in (steps.obs, steps.first)]
    value = jax.lax.map(functools.partial(_value, setup, state), tuple(parts))
    return value.reshape(steps.value.shape)


def _num_parts(setup: Setup) -> int:
    """Of a rollout, in each of which there are as many samples as a part of an update has."""
    return setup.config.num_minibatches * num_microbatches(setup)


def _value(setup: Setup, state: TrainState, seen: tuple[Array, Array]) -> Array:
    """[B] of observations [B, ...], and whether they begin an episode [B]."""
    obs, first = seen
    return setup.agent.value(state.params, state.obs_stats, obs, state.carry, first)


def advantages(setup: Setup, state: TrainState, data: Rollout, hyper: Hyper) -> Array:
    """[T, N] generalised advantage estimates, in the units of the scaled reward.

    Where a time limit cut an episode, the value that follows is that of its final observation; before
    an invalid step that of the observation the step was taken from.

    Args:
        state: after the rollout.
    """
    env, steps = setup.env, data.transitions
    obs = jnp.concatenate([data.final_obs, state.env_state.obs[None]])
    first = jnp.concatenate([jnp.zeros(data.final_obs.shape[:2], bool), state.first[None]])
    # As `_values` does: of an environment that may always truncate there are as many as steps.
    at_a_time = steps.reward.size // _num_parts(setup) // env.num_envs
    value = jax.lax.map(
        functools.partial(_value, setup, state), (obs, first), batch_size=max(1, at_a_time)
    )
    next_value = jnp.concatenate([steps.value[1:], value[-1:]])
    if window := truncation_window(env):
        final_value = value[np.arange(len(next_value)) // window]
        next_value = jnp.where(steps.truncated, final_value, next_value)
    # Without the barrier XLA rewrites this division as it likes, and differently with more devices.
    scale = jax.lax.optimization_barrier(stats.return_scale(state.return_stats))
    reward = clipped(steps.reward, hyper) * hyper.reward_scale / scale
    # What an invalid step would say about those before it is left out as well.
    cut_off = jnp.concatenate([~steps.valid[1:], jnp.zeros_like(steps.valid[:1])])
    return gae(
        reward,
        steps.value,
        next_value,
        steps.terminated,
        steps.truncated | cut_off,
        hyper.gamma,
        hyper.gae_lambda,
    )


def clipped(reward: Array, hyper: Hyper) -> Array:
    """Rewards as they are learned from, in the environment's units."""
    clip = hyper.reward_clip
    return reward if clip is None else jnp.clip(reward, -clip, clip)


def update(
    setup: Setup,
    state: TrainState,
    data: Rollout,
    advantage: Array,
    hyper: Hyper,
    remaining: Array,
    order: Array,
) -> tuple[Learner, UpdateMetrics]:
    """Epochs of minibatches. Metrics are [updates].

    Args:
        advantage: [T, N].
        remaining: [] 1 - i / iterations, for what is annealed.
        order: from `draw`.
    """
    config, steps = setup.config, data.transitions
    learner = Learner(state.params, state.opt_state, jnp.zeros((), bool))
    minibatches = order.reshape(config.update_epochs * config.num_minibatches, -1)
    if config.minibatches == "sequences":
        start = jnp.arange(config.num_steps, dtype=order.dtype) * config.num_envs
        minibatches = (minibatches[:, None] + start[:, None]).reshape(len(minibatches), -1)
    if not config.recompute_advantages:
        samples = _samples(config, steps, advantage, advantage + steps.value)
        step = functools.partial(_update_minibatch, setup, state, samples, hyper, remaining)
        return jax.lax.scan(step, learner, minibatches)
    epoch = functools.partial(_epoch, setup, state, data, hyper, remaining)
    epochs = minibatches.reshape(config.update_epochs, config.num_minibatches, -1)
    learner, metrics = jax.lax.scan(epoch, learner, epochs)
    return learner, jax.tree.map(jnp.ravel, metrics)


def _samples(config: Config, steps: Transition, advantage: Array, target: Array) -> Minibatch:
    """[T * N, ...] what minibatches are picked from; advantage and target are [T, N]."""
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
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)


def _epoch(
    setup: Setup,
    state: TrainState,
    data: Rollout,
    hyper: Hyper,
    remaining: Array,
    learner: Learner,
    minibatches: Array,
) -> tuple[Learner, UpdateMetrics]:
    """One pass over the rollout [M, B], with advantages and targets by the values it begins with.

    Andrychowicz et al. (2021), "What matters for on-policy deep actor-critic methods?", 3.5. Values
    are clipped around those of the rollout, as ratios are.
    """
    now = state.replace(params=learner.params)
    value = _values(setup, now, data.transitions)
    revalued = data.replace(transitions=data.transitions.replace(value=value))
    advantage = advantages(setup, now, revalued, hyper)
    samples = _samples(setup.config, data.transitions, advantage, advantage + value)
    step = functools.partial(_update_minibatch, setup, state, samples, hyper, remaining)
    return jax.lax.scan(step, learner, minibatches)


def _update_minibatch(
    setup: Setup,
    state: TrainState,
    samples: Minibatch,
    hyper: Hyper,
    remaining: Array,
    learner: Learner,
    index: Array,
) -> tuple[Learner, UpdateMetrics]:
    """One step of the optimiser, on the samples [T * N, ...] that index [B] picks."""
    config = setup.config
    batch = jax.tree.map(lambda x: x[index], samples)
    batch = batch.replace(weight=sample_weights(batch.weight > 0))
    if config.normalize_advantages == "minibatch":
        batch = batch.replace(advantage=normalize_advantages(batch.advantage, batch.weight))
    coef = coefficients(config, hyper, remaining)
    gradients = functools.partial(_gradients, setup, state, learner.params, coef)
    grads, losses = mean_over_devices(mean_over_parts(gradients, batch, num_microbatches(setup)))
    opt_state = adapt_learning_rate(hyper, learner.opt_state, losses.approx_kl)
    scale = learning_rate_scale(config, opt_state, remaining)
    params, opt_state, norm = apply_gradients(hyper, learner.params, opt_state, grads, scale)
    stepped = Learner(params, opt_state, learner.stopped)
    if hyper.target_kl is not None:
        stopped = learner.stopped | (losses.approx_kl > hyper.target_kl)
        stepped = jax.tree.map(lambda old, new: jnp.where(stopped, old, new), learner, stepped)
        stepped = stepped.replace(stopped=stopped)
    return stepped, UpdateMetrics(
        losses=losses,
        grad_norm=norm,
        learning_rate=hyper.learning_rate * scale,
        applied=~stepped.stopped,
    )


def num_microbatches(setup: Setup) -> int:
    """Equal parts of a minibatch whose gradients are computed one after another."""
    config, _, agent = setup
    size = config.batch_size // config.num_minibatches
    most = config.microbatch_size or size
    convolutional = agent.network.cnn_layers and jax.default_backend() == "cpu"
    if config.microbatch_size is None and convolutional:
        most = _CACHED // (4 * agent.num_units)
    parts = (n for n in range(1, size + 1) if size % n == 0)
    return next(n for n in parts if size // n <= max(most, 1))


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
    setup: Setup, state: TrainState, params: PyTree, coef: Coefficients, batch: Minibatch
) -> tuple[PyTree, LossMetrics]:
    return jax.grad(_loss, has_aux=True)(params, setup, state, batch, coef)


def _loss(
    params: PyTree, setup: Setup, state: TrainState, batch: Minibatch, coef: Coefficients
) -> tuple[Array, LossMetrics]:
    output = setup.agent.apply(params, state.obs_stats, batch.obs, state.carry, batch.first)
    return ppo_loss(output.policy, output.value, batch, coef)


def coefficients(config: Config, hyper: Hyper, remaining: Array) -> Coefficients:
    """The loss's coefficients, annealed where asked for; remaining [] is 1 - i / iterations."""
    clip = remaining if config.anneal_clip_eps else 1.0
    return Coefficients(
        clip_eps=hyper.clip_eps * clip,
        value_clip_eps=None if hyper.value_clip_eps is None else hyper.value_clip_eps * clip,
        ent_coef=hyper.ent_coef * (remaining if config.anneal_ent_coef else 1.0),
        vf_coef=hyper.vf_coef,
    )


def update_statistics(state: TrainState, steps: Transition, hyper: Hyper) -> TrainState:
    """Statistics with the rollout's observations and rewards merged in."""
    obs_stats, return_stats = state.obs_stats, state.return_stats
    if obs_stats is not None:
        obs_stats = stats.update_moments(obs_stats, steps.obs, steps.valid)
    if return_stats is not None:
        ended = steps.terminated | steps.truncated
        return_stats = stats.update_return_stats(
            return_stats, clipped(steps.reward, hyper), ended, steps.valid, hyper.gamma
        )
    return state.replace(obs_stats=obs_stats, return_stats=return_stats)


def summarize(
    state: TrainState, data: Rollout, advantage: Array, updates: UpdateMetrics, hyper: Hyper
) -> Metrics:
    """The iteration in numbers; advantage [T, N], updates [U]."""
    steps, episodes = data.transitions, data.episodes
    weight, update_weight = sample_weights(steps.valid), sample_weights(updates.applied)
    applied = jax.tree.map(lambda x: weighted_mean(x, update_weight), updates)
    target_var = weighted_var(advantage + steps.value, weight)
    unexplained = weighted_var(advantage, weight) / target_var
    unit = stats.return_scale(state.return_stats) / hyper.reward_scale
    count = jnp.sum(episodes.ended)
    return Metrics(
        episode_return=jnp.sum(jnp.where(episodes.ended, episodes.score, 0.0)) / count,
        episode_length=jnp.sum(jnp.where(episodes.ended, episodes.length, 0)) / count,
        episodes=count,
        value_mean=weighted_mean(steps.value, weight) * unit,
        policy_loss=applied.losses.policy_loss,
        value_loss=applied.losses.value_loss,
        entropy=applied.losses.entropy,
        approx_kl=applied.losses.approx_kl,
        clip_fraction=applied.losses.clip_fraction,
        explained_variance=jnp.where(target_var > 0, 1 - unexplained, jnp.nan),
        grad_norm=applied.grad_norm,
        learning_rate=applied.learning_rate,
        invalid_steps=jnp.sum(~steps.valid),
    )
