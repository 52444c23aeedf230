"""Every registered environment keeps the contract of `envs/base.py`."""

import dataclasses
import functools
import importlib.util
import pkgutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo import envs
from purejaxppo.config import Hyper, config_directory
from purejaxppo.distributions import draw_noise
from purejaxppo.envs import Vectorized, load_settings
from purejaxppo.envs.base import VectorState
from purejaxppo.envs.brax import backends, quietly
from purejaxppo.rollouts import truncation_window
from purejaxppo.spaces import Box, Discrete
from purejaxppo.train import make_setup, make_train
from purejaxppo.validation import validate
from purejaxppo.values import ConfigError

DOWNLOADS = {"MNISTBandit-bsuite"}
ALL = envs.list_environments()
GYMNAX = [name for name in ALL if "/" not in name and name not in DOWNLOADS]
MINATAR = [name for name in GYMNAX if name.endswith("-MinAtar")]  # all have the same settings
BRAX = [name for name in ALL if name.startswith("brax/")]
PLAYGROUND = [name for name in ALL if name.startswith("playground/")]
OCTAX = [name for name in ALL if name.startswith("octax/")]
CRAFTAX = [name for name in ALL if name.startswith("craftax/")]
XMINIGRID = [name for name in ALL if name.startswith("xminigrid/")]
# Physics takes long to compile: these always, the others with `-m slow`.
QUICK = {
    "inverted_pendulum", "CartpoleBalance", "brix", "Craftax-Classic-Symbolic-v1", "MiniGrid-DoorKey-5x5",
}  # fmt: skip
QUICK_BACKENDS = (None, "spring", "mjx")
EXTRAS = {
    "playground": "mujoco_playground", "octax": "octax", "craftax": "craftax", "xminigrid": "xminigrid",
}  # fmt: skip
NUM_ENVS, STEPS = 3, 130


def installed(extra):
    return importlib.util.find_spec(EXTRAS[extra]) is not None


def marks(name, backend=None):
    """Of a name, or of a configuration file."""
    stem = Path(name).stem
    physics = "/" in name and "/gymnax/" not in name and "/examples/" not in name
    known = QUICK & {stem, stem.partition("-")[0]}
    quick = known and "positional" not in name and backend in QUICK_BACKENDS
    slow = [pytest.mark.slow] if physics and not quick else []
    absent = [extra for extra in EXTRAS if f"{extra}/" in name and not installed(extra)]
    return [*slow, pytest.mark.skipif(bool(absent), reason=f"the extra {absent} is not installed")]


def test_registry_is_complete():
    """The names are written down so that listing them needs no import; this keeps them true."""
    import gymnax

    with quietly():
        import brax.envs

    assert set(gymnax.registered_envs) == {*GYMNAX, *DOWNLOADS}
    assert len(GYMNAX) == 25
    # "fast" is a test of Brax's own.
    assert {f"brax/{name}" for name in brax.envs._envs} == {*BRAX, "brax/fast"}
    if installed("octax"):
        import octax.environments

        games = pkgutil.iter_modules(octax.environments.__path__)
        levels = {name.rstrip("0123456789") for name in OCTAX}
        assert {f"octax/{game.name}" for game in games} == levels
    if installed("playground"):
        from mujoco_playground import dm_control_suite

        assert {f"playground/{name}" for name in dm_control_suite.ALL_ENVS} == set(PLAYGROUND)


@pytest.mark.parametrize("suite", EXTRAS)
def test_what_to_install_is_said(suite, monkeypatch):
    extra = EXTRAS[suite]
    for module in [name for name in sys.modules if name.partition(".")[0] == extra]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigError, match=rf"pip install 'purejaxppo\[{suite}\]'"):
        envs.make(next(name for name in ALL if name.startswith(f"{suite}/")))


WORLDS = [(name, {}) for name in GYMNAX]
WORLDS += [
    (name, {"backend": backend, "episode_length": 50})
    for name in BRAX
    for backend in backends(name)
]
WORLDS += [(name, {"episode_length": 50}) for name in PLAYGROUND]
WORLDS += [(name, {"max_num_steps_per_episodes": 50}) for name in OCTAX]
WORLDS += [(name, {"max_timesteps": 50}) for name in CRAFTAX]
WORLDS += [(name, {"max_steps": 50}) for name in XMINIGRID]


@pytest.mark.parametrize(
    ("name", "env_args"),
    [
        pytest.param(
            name,
            args,
            marks=marks(name, args.get("backend")),
            id=f"{name}-{args.get('backend', '')}",
        )
        for name, args in WORLDS
    ],
)
def test_contract(name, env_args):
    """Shapes, types, bounds, clock and resets over a rollout with random actions."""
    env = envs.make(name, env_args)
    vector = Vectorized(env, NUM_ENVS)
    noise = draw_noise(jax.random.key(2), env.action_space, (STEPS, NUM_ENVS))
    if isinstance(env.action_space, Box):
        low, high = (jnp.ravel(bound) for bound in env.action_space.bounds)
        actions = jnp.clip(noise, jnp.maximum(low, -10), jnp.minimum(high, 10))
    else:
        actions = jnp.argmax(noise, axis=-1)

    get_obs = _gymnaxs_own(name) if name in MINATAR else lambda _: ()

    def step(state, inputs):
        action, key = inputs
        seen = state.obs, get_obs(state.env)
        state, timestep, episode = vector.step(jax.random.split(key, NUM_ENVS), state, action)
        return state, (seen, timestep, episode)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def rollout(key):
        # As after `reset`, which would be traced and compiled beside that of the pool.
        zeros, zero = jnp.zeros(NUM_ENVS), jnp.zeros((), jnp.int32)
        state = VectorState(None, None, zeros, zeros.astype(jnp.int32), None, zero)
        state = vector.begin_rollout(jax.random.split(key, (vector.pool_size, NUM_ENVS)), state)
        first = jax.tree.map(lambda x: x[0], state.pool)
        start = state.replace(env=first.state, obs=first.obs)
        end, data = jax.lax.scan(step, start, (actions, jax.random.split(key, STEPS)))
        return vector.end_rollout(start), vector.end_rollout(end), data

    start, end, ((obs, theirs), timestep, episode) = rollout(jax.random.key(1))
    assert jax.tree.structure(start) == jax.tree.structure(end)
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert not getattr(before, "weak_type", False)  # a key has none
        assert not getattr(after, "weak_type", False)
    assert obs.shape == (STEPS, NUM_ENVS, *env.observation_space.shape)
    assert timestep.reward.shape == timestep.terminated.shape == (STEPS, NUM_ENVS)
    assert np.isfinite(obs).all()
    assert np.isfinite(timestep.reward).all()
    assert timestep.valid.all()
    _check_observations(env.observation_space, np.asarray(obs))
    _check_clock(vector, timestep, episode)
    if name in MINATAR:  # nothing is lost where what Gymnax gives as float32 is kept as booleans
        assert (obs.dtype, theirs.dtype, set(np.unique(theirs))) == (bool, np.float32, {0, 1})
        np.testing.assert_array_equal(obs, theirs)


def _gymnaxs_own(name):
    """Observations [N, ...] of states by a game of Gymnax's."""
    import gymnax

    game, _ = gymnax.make(name)
    return jax.vmap(game.get_obs)


def _check_observations(space, obs):
    if isinstance(space, Discrete):
        assert obs.dtype == np.int32
        assert ((obs >= 0) & (obs < space.n)).all()
    else:
        kept = space.dtype == "uint8"  # bytes stay bytes
        assert obs.dtype in ((np.uint8,) if kept else (np.float32, np.int32, np.bool))


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


SHIPPED = sorted(map(str, config_directory().glob("*/*.yaml")))


def settings_of(path):
    """What `--env NAME` uses, or `--env NAME --backend BACKEND`, or `--config FILE`."""
    path = Path(path)
    if path.parent.name == "examples":
        return load_settings(file=path)
    name, _, backend = path.stem.partition("-")
    return load_settings(f"{path.parent.name}/{name}", backend=backend or None)


# Those outside of the program have tests of their own.
EXTERNAL = ("/atari/", "/mujoco/", "/box2d/", "/atari_")
TRAINED = [
    *GYMNAX,
    *(p for p in SHIPPED if Path(p).stem not in GYMNAX and not any(part in p for part in EXTERNAL)),
]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            source,
            marks=[*marks(source), *[pytest.mark.slow] * (source in MINATAR[1:])],
            id=Path(source).stem,
        )
        for source in TRAINED
        if Path(source).stem != "defaults"
    ],
)
def test_configuration_trains_one_iteration(source):
    """With fewer environments and steps."""
    settings = load_settings(source) if source in GYMNAX else settings_of(source)
    validate(settings)
    config = settings.config
    small = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
    config = type(config)(**vars(config) | small | {"total_timesteps": 16})
    train = jax.jit(make_train(config), compiler_options={"xla_backend_optimization_level": 0})
    state, metrics = train(jax.random.key(0), settings.hyper)
    for leaf in jax.tree.leaves(state.params):
        assert np.isfinite(leaf).all()
    assert np.isfinite(metrics.policy_loss).all()
    assert int(state.iteration) == 1


def test_fresh_resets_train_too():
    config = dataclasses.replace(load_settings("CartPole-v1").config, reset_mode="fresh")
    assert make_setup(config).env.pool_size == 0
    metrics = jax.eval_shape(make_train(config), jax.random.key(0), Hyper())[1]
    assert metrics.episodes.shape == (config.iterations,)
