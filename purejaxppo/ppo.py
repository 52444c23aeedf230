"""Proximal policy optimisation (Schulman et al., 2017): the algorithm and nothing else.

`init` makes a `TrainState`, `iterate` is one iteration: rollout, advantages, update, statistics.
Both are pure, so they compile, scan and vmap. Keys are derived by name from the run's key and the
iteration, and never carried.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from purejaxppo import stats
from purejaxppo.agent import init_optimizer
from purejaxppo.config import Hyper
from purejaxppo.devices import split_keys
from purejaxppo.losses import sample_weights, weighted_mean, weighted_var
from purejaxppo.rollouts import Setup, advantages, clipped, draw, rollout
from purejaxppo.types import Metrics, Rollout, Scalar, TrainState, Transition
from purejaxppo.updates import UpdateMetrics, annealed, update


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
        iterations: [] how many there are in all, over which annealing runs. Beyond them what is annealed stays as it was last: a learning rate of 0.
    """
    remaining = jnp.maximum(1.0 - state.iteration / iterations, 0.0)
    now = annealed(setup.config, hyper, remaining)
    draws = draw(setup, jax.random.fold_in(state.key, state.iteration))
    state, data = rollout(setup, state, draws)
    advantage = advantages(setup, state, data, hyper)
    learner, updates = update(setup, state, data, advantage, now, draws.order)
    metrics = summarize(state, data, advantage, updates, hyper)
    state = update_statistics(state, data.transitions, hyper)
    return state.replace(
        params=learner.params, opt_state=learner.opt_state, iteration=state.iteration + 1
    ), metrics


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
    whole = episodes.ended & ~jnp.isnan(episodes.score)
    count = jnp.sum(whole)
    return Metrics(
        episode_return=jnp.sum(jnp.where(whole, episodes.score, 0.0)) / count,
        episode_length=jnp.sum(jnp.where(whole, episodes.length, 0)) / count,
        episodes=count,
        value_mean=weighted_mean(steps.value, weight) * unit,
        **vars(applied.losses),
        explained_variance=jnp.where(target_var > 0, 1 - unexplained, jnp.nan),
        grad_norm=applied.grad_norm,
        learning_rate=applied.learning_rate,
        invalid_steps=jnp.sum(~steps.valid),
    )
