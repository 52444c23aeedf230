"""The first half of an iteration: the policy acts, and what it did is weighed against its values."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from purejaxppo import machine, stats
from purejaxppo.agent import Agent
from purejaxppo.config import Config, Hyper
from purejaxppo.devices import num_shards, own_share
from purejaxppo.distributions import noise_from_bits, num_outputs
from purejaxppo.envs.base import VectorEnvironment, begins, finite_start
from purejaxppo.losses import gae
from purejaxppo.scans import vector_scan
from purejaxppo.shuffles import BITS, permutations
from purejaxppo.types import Episode, Final, PyTree, Rollout, TrainState, Transition

# What a CPU learns from fastest at a time: bytes of activations of images, and samples of dense layers a
# core, whose activations its cache holds.
_CACHED = 48 * 2**20
_CACHED_SAMPLES = 2048


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
    order: Array  # [epochs, T * N] uint32, permutations of the samples; [epochs, N] of sequences


class Actor(struct.PyTreeNode):
    """What a step of the rollout changes."""

    env_state: PyTree
    first: Array  # [N] bool
    carry: PyTree  # [N, H]
    final: Final  # [K, N, ...]


def draw(setup: Setup, key: Array) -> Draws:
    """Every random number of an iteration in one batch; consumes key.

    Each call of the generator takes 25 ms to trace and compile, and inside a scan its time too.
    """
    config, env, _ = setup
    width = jax.random.key_data(key).size  # words of a key
    num_envs = env.num_envs * num_shards()
    rows = 1 if config.in_sequences else config.num_steps
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
    slots = final_slots(setup)
    actor = Actor(
        env_state=finite_start(env.begin_rollout(draws.key_pool, state.env_state)),
        first=state.first,
        carry=state.carry,
        final=jax.tree.map(
            lambda x: jnp.zeros((slots, *x.shape), x.dtype), Final(obs, state.carry)
        ),
    )
    act = functools.partial(_act, setup, state.params, state.obs_stats)
    actor, (transitions, episodes) = vector_scan(act, actor, steps, env.num_envs)
    env_state = env.end_rollout(actor.env_state)
    if not setup.agent.network.shared_torso:
        transitions = transitions.replace(value=values(setup, state, transitions))
    data = Rollout(transitions, episodes, state.carry, actor.final)
    return state.replace(env_state=env_state, first=actor.first, carry=actor.carry), data


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
        value=output.value if agent.network.shared_torso else jnp.zeros(batch),  # see `values`
        reward=timestep.reward,
        terminated=timestep.terminated,
        truncated=timestep.truncated,
        valid=valid,
    )
    final = actor.final
    if window := truncation_window(env):
        slot = t // window if len(final.obs) > 1 else 0  # of one, no copy is made

        def put(slots: Array, x: Array) -> Array:
            mask = timestep.truncated.reshape(batch + (1,) * (x.ndim - 1))
            before = jax.lax.dynamic_index_in_dim(slots, slot, keepdims=False)
            now = jnp.where(mask, x, before)
            return jax.lax.dynamic_update_index_in_dim(slots, now, slot, axis=0)

        final = jax.tree.map(put, final, Final(timestep.obs, output.carry))
    first = begins(env, timestep, episode)
    return Actor(env_state, first, output.carry, final), (transition, episode)


def truncation_window(env: VectorEnvironment) -> int | None:
    """W such that no environment truncates twice within W steps, however a rollout begins.

    One slot for final observations in every window then holds them all. None: none is needed.
    """
    if env.external:
        return None  # a final observation is acted on like any other
    return 1 if env.may_truncate else env.max_episode_steps


def final_slots(setup: Setup) -> int:
    """K, so many final observations of an environment a rollout keeps."""
    window = truncation_window(setup.env)
    return -(-setup.config.num_steps // window) if window else 0


def values(setup: Setup, state: TrainState, steps: Transition) -> Array:
    """[T, N] of a network without memory, after the rollout.

    Where the value network has nothing in common with the policy's, these are a few large products in
    place of small ones in every step, which XLA leaves out as nothing reads them. As many observations at
    a time as an update has, so that this takes no more memory.
    """
    parts = jax.tree.map(
        lambda x: x.reshape(_num_parts(setup), -1, *x.shape[2:]), (steps.obs, (), steps.first)
    )
    value = jax.lax.map(functools.partial(_value, setup, state), parts)
    return value.reshape(steps.value.shape)


def as_samples(config: Config, steps: PyTree) -> PyTree:
    """Of arrays [T, N, ...] what minibatches are picked from: [T * N, ...], or sequences [N, T, ...]."""
    if config.in_sequences:
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)


def _num_parts(setup: Setup) -> int:
    """Of a rollout, in each of which there are as many samples as a part of an update has."""
    return setup.config.num_minibatches * num_microbatches(setup)


def num_microbatches(setup: Setup) -> int:
    """Equal parts of a minibatch whose gradients are computed one after another.

    By default nearly what a CPU's caches hold, and a minibatch as a whole on other devices.
    """
    config, _, agent = setup
    size = config.batch_size // config.num_minibatches
    rows = size // config.num_steps if config.in_sequences else size  # are not divided
    parts = _divisors(rows)
    if config.microbatch_size is not None:
        return next((n for n in parts if size // n <= config.microbatch_size), rows)
    if jax.default_backend() != "cpu":
        return 1
    if agent.network.cnn_layers:
        most = _CACHED / (4 * agent.num_units)
    else:
        most = _CACHED_SAMPLES * machine.num_cores()
    return min(parts, key=lambda n: abs(math.log(size / n / most)))


@functools.cache
def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _value(setup: Setup, state: TrainState, seen: tuple[Array, PyTree, Array]) -> Array:
    """[B] of observations [B, ...], the memory before them, and whether they begin an episode [B]."""
    return setup.agent.value(state.params, state.obs_stats, *seen)


def advantages(setup: Setup, state: TrainState, data: Rollout, hyper: Hyper) -> Array:
    """[T, N] generalised advantage estimates, in the units of the scaled reward.

    Where a time limit cut an episode, the value that follows is that of its final observation; before
    an invalid step that of the observation the step was taken from.

    Args:
        state: after the rollout.
    """
    env, steps = setup.env, data.transitions
    ends = data.final.obs, data.final.carry, jnp.zeros(data.final.obs.shape[:2], bool)
    next_ones = state.env_state.obs, state.carry, state.first
    seen = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), ends, next_ones)
    # As `values` does: of an environment that may always truncate there are as many as steps.
    at_a_time = steps.reward.size // _num_parts(setup) // env.num_envs
    value = jax.lax.map(functools.partial(_value, setup, state), seen, batch_size=max(1, at_a_time))
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
