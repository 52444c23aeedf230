"""Every registered environment keeps the contract of `envs/base.py`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import envs
from purejaxppo.config import config_directory, load_settings, validate
from purejaxppo.distributions import draw_noise
from purejaxppo.envs import Vectorized
from purejaxppo.ppo import truncation_window
from purejaxppo.spaces import Box, Discrete
from purejaxppo.train import make_setup, make_train

DOWNLOADS = {"MNISTBandit-bsuite"}
NAMES = [name for name in envs.list_environments() if name not in DOWNLOADS]
NUM_ENVS, STEPS = 3, 130


def test_registry_is_complete():
    """The names are written down so that listing them needs no import; this keeps them true."""
    import gymnax

    assert set(gymnax.registered_envs) == {*NAMES, *DOWNLOADS}
    assert len(NAMES) == 25


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    """Shapes, types, bounds, clock and resets over a rollout with random actions."""
    env = envs.make(name)
    vector = Vectorized(env, NUM_ENVS)
    noise = draw_noise(jax.random.key(2), env.action_space, (STEPS, NUM_ENVS))
    if isinstance(env.action_space, Box):
        low, high = (jnp.ravel(bound) for bound in env.action_space.bounds)
        actions = jnp.clip(noise, jnp.maximum(low, -10), jnp.minimum(high, 10))
    else:
        actions = jnp.argmax(noise, axis=-1)

    def step(state, inputs):
        action, key = inputs
        obs = state.obs
        state, timestep, episode = vector.step(jax.random.split(key, NUM_ENVS), state, action)
        return state, (obs, timestep, episode)

    @jax.jit
    def rollout(key):
        state = vector.reset(key)
        start = vector.begin_rollout(key, state)
        end, data = jax.lax.scan(step, start, (actions, jax.random.split(key, STEPS)))
        return state, end, data

    start, end, (obs, timestep, episode) = rollout(jax.random.key(1))
    assert jax.tree.structure(start) == jax.tree.structure(end)
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True):
        assert (before.shape, before.dtype, before.weak_type) == (
            after.shape, after.dtype, after.weak_type,
        )  # fmt: skip
    assert obs.shape == (STEPS, NUM_ENVS, *env.observation_space.shape)
    assert timestep.reward.shape == timestep.terminated.shape == (STEPS, NUM_ENVS)
    assert np.isfinite(obs).all()
    assert np.isfinite(timestep.reward).all()
    assert timestep.valid.all()
    _check_observations(env.observation_space, np.asarray(obs))
    _check_clock(vector, timestep, episode)


def _check_observations(space, obs):
    if isinstance(space, Discrete):
        assert obs.dtype == np.int32
        assert ((obs >= 0) & (obs < space.n)).all()
    else:
        assert obs.dtype in (np.float32, np.int32)


def _check_clock(vector, timestep, episode):
    """Nothing outlives its limit, and two truncations are never closer than declared."""
    limit = vector.max_episode_steps
    assert limit is not None
    assert episode.length.max() <= limit
    window = truncation_window(vector)
    for n in range(NUM_ENVS):
        times = np.flatnonzero(timestep.truncated[:, n])
        assert (np.diff(times) >= window).all()
    # An environment that cuts an episode before its limit has to declare it.
    early = np.asarray(timestep.truncated) & (np.asarray(episode.length) < limit)
    assert vector.may_truncate or not early.any()


EXAMPLES = sorted((config_directory() / "examples").glob("*.yaml"))


@pytest.mark.parametrize("source", [*NAMES, *EXAMPLES], ids=lambda source: Path(source).stem)
def test_configuration_trains_one_iteration(source):
    """The settings that `--env NAME` or `--config FILE` uses, with fewer environments and steps."""
    from_file = isinstance(source, Path)
    settings = load_settings(file=source) if from_file else load_settings(source)
    validate(settings)
    config = settings.config
    small = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
    config = type(config)(**vars(config) | small | {"total_timesteps": 16})
    state, metrics = jax.jit(make_train(config))(jax.random.key(0), settings.hyper)
    for leaf in jax.tree.leaves(state.params):
        assert np.isfinite(leaf).all()
    assert np.isfinite(metrics.policy_loss).all()
    assert int(state.iteration) == 1


def test_fresh_resets_train_too():
    settings = load_settings("CartPole-v1")
    config = type(settings.config)(
        **vars(settings.config) | {"reset_mode": "fresh", "total_timesteps": 64, "num_steps": 8}
    )
    assert make_setup(config).env.reset(jax.random.key(0)).pool is None
    state, _ = jax.jit(make_train(config))(jax.random.key(0), settings.hyper)
    assert int(state.iteration) >= 1
