"""Brax's environments: what the adapter adds, and what its wrappers would get wrong."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import struct
from iterations import advantages, apply, init, rollout

from purejaxppo import envs
from purejaxppo.config import Config, Hyper
from purejaxppo.envs import Vectorized
from purejaxppo.envs.brax import BraxEnvironment
from purejaxppo.train import as_arrays, make_setup
from purejaxppo.values import ConfigError

FAST = {"xla_backend_optimization_level": 0}


@struct.dataclass
class State:
    """The fields of Brax's own."""

    pipeline_state: jax.Array
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    metrics: dict = struct.field(default_factory=dict)
    info: dict = struct.field(default_factory=dict)


class Walk:
    """In Brax's style: the position grows by the action and pays itself; the task ends at 10."""

    action_size = 1

    def reset(self, rng):
        start = jax.random.uniform(rng)
        zero = jnp.zeros(())
        return State(start, start[None], zero, zero, {"position": zero}, {"steps": zero})

    def step(self, state, action):
        position = state.pipeline_state + action[0]
        state.metrics.update(position=position)
        info = {"steps": state.info["steps"] + 1}
        # Weak types, as Brax's environments have them.
        done = jnp.where(position > 10, 1.0, 0.0)
        return state.replace(
            pipeline_state=position, obs=position[None], reward=position * 1.0, done=done, info=info
        )


def test_action_repeat_sums_rewards_and_stops_at_the_end_of_the_episode():
    env = BraxEnvironment(Walk(), episode_length=10, action_repeat=4)
    assert env.max_episode_steps == 3
    state, obs = env.reset(jax.random.key(0))
    start = float(obs[0])
    state, step = env.step(jax.random.key(0), state, jnp.array([1.0]))
    np.testing.assert_allclose(step.obs, [start + 4], rtol=1e-6)
    np.testing.assert_allclose(step.reward, 4 * start + 1 + 2 + 3 + 4, rtol=1e-6)
    assert not step.terminated
    assert state.info["steps"] == 4
    state, step = env.step(jax.random.key(0), state, jnp.array([5.0]))
    # Above 10 after two steps: the others do not happen.
    np.testing.assert_allclose(step.obs, [start + 14], rtol=1e-6)
    np.testing.assert_allclose(step.reward, 2 * start + 9 + 14, rtol=1e-6)
    assert step.terminated
    assert not step.truncated
    assert state.info["steps"] == 6


def test_the_state_holds_only_what_the_next_step_reads():
    env = BraxEnvironment(Walk())
    state, _ = env.reset(jax.random.key(0))
    after, _ = env.step(jax.random.key(0), state, jnp.zeros(1))
    for held in (state, after):
        assert (held.obs, held.reward, held.done, held.metrics) == (None, None, None, {})
    assert jax.tree.structure(state) == jax.tree.structure(after)


class Remembering(Walk):
    """Shows the last three positions, by its own observation before."""

    def reset(self, rng):
        state = super().reset(rng)
        return state.replace(obs=jnp.repeat(state.obs, 3))

    def step(self, state, action):
        after = super().step(state, action)
        return after.replace(obs=jnp.roll(state.obs, 1).at[0].set(after.obs[0]))


def test_a_history_in_observations_is_kept_where_asked_for():
    env = BraxEnvironment(Remembering(), action_repeat=2, reads_obs=True)
    state, obs = env.reset(jax.random.key(0))
    for _ in range(2):
        state, timestep = env.step(jax.random.key(0), state, jnp.ones(1))
    np.testing.assert_allclose(timestep.obs, obs[0] + jnp.array([4, 3, 2]), rtol=1e-6)


def test_the_value_after_a_time_limit_is_that_of_the_final_observation():
    env = BraxEnvironment(Walk(), episode_length=4)
    config = Config(num_envs=3, num_steps=8, torso_layers=(8,), num_minibatches=1, pool_size=1)
    setup, hyper = make_setup(config, env), as_arrays(Hyper(gamma=0.9, gae_lambda=0.0))
    before = init(setup, jax.random.key(0), hyper)
    state, data = rollout(setup, before, jax.random.key(1))
    steps = data.transitions
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated[:, 0]), [3, 7])
    final = steps.obs[3] + jnp.clip(steps.action[3], -1, 1)
    assert np.abs(final - steps.obs[4]).min() > 1e-3  # the next one acted on is a new start

    def value(obs):
        nothing = jnp.zeros(3, bool)
        return apply(setup.agent, before.params, before.obs_stats, obs, (), nothing).value

    advantage = advantages(setup, state, data, hyper)
    expected = steps.reward[3] + 0.9 * value(final) - steps.value[3]
    np.testing.assert_allclose(advantage[3], expected, rtol=1e-4, atol=1e-5)


NUM_ENVS, STEPS = 16, 60


@pytest.fixture(scope="module")
def pendulums():
    """A rollout of inverted pendulums that start at a given key, with given actions."""
    vector = Vectorized(envs.make("inverted_pendulum"), NUM_ENVS, pool_size=1)

    def step(state, inputs):
        obs, (action, key) = state.obs, inputs
        state, timestep, episode = vector.step(jax.random.split(key, NUM_ENVS), state, action)
        return state, (obs, timestep, episode)

    def play(key, actions):
        key_reset, key_pool, key_steps = jax.random.split(key, 3)
        starts = jax.random.split(key_pool, (1, NUM_ENVS))
        start = vector.begin_rollout(starts, vector.reset(jax.random.split(key_reset, NUM_ENVS)))
        inputs = actions, jax.random.split(key_steps, STEPS)
        return jax.lax.scan(step, start, inputs)[1]

    return jax.jit(play, compiler_options=FAST)


def test_every_reset_has_the_distribution_of_a_fresh_one(pendulums):
    """Brax's own wrapper would replay the first state of each environment for ever."""
    actions = jnp.ones((STEPS, NUM_ENVS, 1))  # falls within a few steps
    starts = []
    for seed in range(8):
        obs, _, episode = pendulums(jax.random.key(seed), actions)
        ended = np.asarray(episode.ended)[:-1]
        assert ended.sum(0).min() >= 1
        # The first reset of each environment: the pool has one start for each.
        first = ended.argmax(0) + 1
        starts.append(np.asarray(obs)[first, np.arange(NUM_ENVS)])
    starts = np.concatenate(starts)
    assert len(np.unique(starts[:, 0])) == len(starts)
    for coordinate in starts.T:
        uniform = scipy.stats.uniform(-0.01, 0.02)
        assert scipy.stats.kstest(coordinate, uniform.cdf).pvalue > 1e-3


def test_physics_that_breaks_ends_its_episode_and_harms_nothing_else(pendulums):
    actions = jnp.zeros((STEPS, NUM_ENVS, 1))
    _, clean, _ = pendulums(jax.random.key(0), actions)
    obs, timestep, episode = pendulums(jax.random.key(0), actions.at[20, 3].set(jnp.nan))
    assert clean.valid.all()
    assert not timestep.valid[20, 3]
    assert (~timestep.valid).sum() == 1
    assert timestep.terminated[20, 3]
    assert timestep.reward[20, 3] == 0
    assert episode.ended[20, 3]
    assert np.isfinite(obs).all()
    assert np.abs(obs[21, 3]).max() <= 0.01  # a new start
    others = np.arange(NUM_ENVS) != 3
    for name in ("obs", "reward", "terminated"):
        np.testing.assert_array_equal(
            getattr(timestep, name)[:, others], getattr(clean, name)[:, others]
        )


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("swimmer", {"backend": "spring"}, "--backend spring: brax/swimmer runs on generalized"),
        ("brax/ant", {"backend": "sprng"}, "did you mean spring"),
        ("ant", {"episode_length": 0}, "episode_length=0: must be a whole number, at least 1"),
        ("ant", {"action_repeat": 1.5}, "action_repeat=1.5"),
        ("hopper", {"n_frames": 0}, "n_frames=0: must be a whole number, at least 1"),
        ("ant", {"healthy_z_range": 1}, "--env-args of brax/ant: "),
        ("ant", {"episode_lenght": 10}, "did you mean episode_length"),
        ("brax/ants", {}, "did you mean brax/ant"),
    ],
)
def test_wrong_arguments_are_named(name, arguments, words):
    with pytest.raises(ConfigError, match=words):
        envs.make(name, arguments)


def test_a_suite_may_be_left_out_where_the_name_is_of_one_only():
    assert envs.full_name("ant") == "brax/ant"
    assert envs.full_name("CheetahRun") == "playground/CheetahRun"
    assert envs.full_name("CartPole-v1") == "CartPole-v1"
    assert envs.full_name("no_such") == "no_such"


def test_the_libraries_say_nothing():
    code = "from purejaxppo import make; make('brax/hopper', {'backend': 'mjx'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_swimmer_is_carried_by_its_fluid():
    """Which Brax computes with an argument that JAX has dropped."""
    env = envs.make("brax/swimmer")
    key, action = jax.random.key(0), jnp.ones(2)

    def forwards():
        state, _ = env.reset(key)
        return env.step(key, state, action)[1].reward

    reward = jax.jit(forwards).lower().compile(FAST)()
    assert np.isfinite(reward)
    assert reward != 0
