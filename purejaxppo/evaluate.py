"""Whole episodes of a policy, inside jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from purejaxppo.agent import Agent
from purejaxppo.devices import num_shards, own_share, split_keys
from purejaxppo.distributions import draw_noise
from purejaxppo.envs.base import VectorEnvironment, begins, finite_start
from purejaxppo.stats import Moments
from purejaxppo.types import Episode, PyTree

# An episode without a time limit that is still going on after so many steps is given up.
MAX_STEPS = 10_000


def key_of(seed: int | Array, number: int = 0) -> Array:
    """The key of a set of episodes: none of those that a training with this seed makes of its own."""
    return jax.random.fold_in(jax.random.key(seed), 2**32 - 1 - number)


class Player(struct.PyTreeNode):
    """E environments, and what a policy remembers of their episodes."""

    env_state: PyTree
    carry: PyTree  # [E, H], () without a memory
    first: Array  # [E] bool: the observation to act on begins an episode


def begin(env: VectorEnvironment, agent: Agent, key: Array) -> Player:
    """At the start of E episodes; key [E], each consumed."""
    env_state = finite_start(env.reset(key))
    return Player(env_state, agent.init_carry(env.num_envs), jnp.ones(env.num_envs, bool))


def advance(
    env: VectorEnvironment,
    agent: Agent,
    params: PyTree,
    obs_stats: Moments | None,
    player: Player,
    key: Array,
    sampled: bool,
) -> tuple[Player, Episode]:
    """One step of each environment; consumes key."""
    (key_noise,), key_env = split_keys(key, env.num_envs)
    obs = player.env_state.obs
    output = agent.apply(params, obs_stats, obs, player.carry, player.first)
    if sampled:
        everywhere = (env.num_envs * num_shards(),)
        noise = own_share(draw_noise(key_noise, env.action_space, everywhere), axis=0)
        action = output.policy.sample(noise)
    else:
        action = output.policy.mode()
    env_state, step, episode = env.step(key_env, player.env_state, output.policy.to_env(action))
    return Player(env_state, output.carry, begins(env, step, episode)), episode


class _Progress(struct.PyTreeNode):
    t: Array  # []
    player: Player
    episode: Episode  # [E] the first episode of each environment


def evaluate(
    env: VectorEnvironment,
    agent: Agent,
    params: PyTree,
    obs_stats: Moments | None,
    key: Array,
    sampled: bool = False,
) -> Episode:
    """The first episode of each environment, so that short ones do not weigh more.

    Args:
        env: of E environments.
        key: consumed; none of a training, see `key_of`.
        sampled: sample the actions, as a rollout does, instead of taking the most likely ones.

    Returns:
        [E]; `ended` is False for an episode that was given up, or ended by an invalid step: it should not be
        counted.
    """
    num_envs = env.num_envs
    limit = env.max_episode_steps or MAX_STEPS
    (key_steps,), key_reset = split_keys(key, num_envs)

    def step(progress: _Progress) -> _Progress:
        key = jax.random.fold_in(key_steps, progress.t)
        player, now = advance(env, agent, params, obs_stats, progress.player, key, sampled)
        done = progress.episode.ended
        episode = jax.tree.map(lambda a, b: jnp.where(done, a, b), progress.episode, now)
        return _Progress(progress.t + 1, player, episode)

    def unfinished(progress: _Progress) -> Array:
        return (progress.t < limit) & ~jnp.all(progress.episode.ended)

    zeros = jnp.zeros(num_envs)
    start = _Progress(
        t=jnp.zeros((), jnp.int32),
        player=begin(env, agent, key_reset),  # without a rollout: later episodes do not count
        episode=Episode(zeros.astype(bool), zeros, zeros.astype(jnp.int32)),
    )
    episode = jax.lax.while_loop(unfinished, step, start).episode
    return episode.replace(ended=episode.ended & ~jnp.isnan(episode.score))
