"""Whole episodes, one of each environment."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from probes import Clock, Poisoned

from purejaxppo import evaluate as evaluate_module
from purejaxppo import ppo, stats
from purejaxppo.config import Config, Hyper
from purejaxppo.devices import split_keys
from purejaxppo.envs.base import Vectorized
from purejaxppo.evaluate import evaluate, key_of
from purejaxppo.train import make_setup


@dataclasses.dataclass(frozen=True)
class Staggered(Vectorized):
    """Clocks of which environment n lives n + 1 steps in its first episode."""

    def reset(self, key):
        state = super().reset(key)
        life = 1.0 + jnp.arange(self.num_envs)
        start = state.obs.at[:, 1].set(life)
        return state.replace(env=start, obs=start)


def zero_agent(env):
    """An agent of the Clock without hidden layers, all of whose parameters are zero."""
    agent = make_setup(Config(torso_layers=()), env).agent
    params = jax.eval_shape(agent.init, jax.random.key(0), Hyper())
    return agent, jax.tree.map(lambda x: jnp.zeros(x.shape), params)


def clock_score(length, action):
    """The Clock earns a tenth of what it shows, which is 11 after the first step, and the action."""
    return 0.1 * (10 * length + length * (length + 1) / 2) + action * length


def test_an_evaluation_is_the_first_episode_of_each_environment():
    env = Staggered(Clock(), num_envs=9)
    agent, params = zero_agent(Clock())
    result = jax.jit(lambda key: evaluate(env, agent, params, None, key))(jax.random.key(0))
    lengths = np.arange(1, 10)
    assert np.all(result.ended)
    np.testing.assert_array_equal(result.length, lengths)
    np.testing.assert_allclose(result.score, clock_score(lengths, 0), rtol=1e-5)


def test_an_evaluation_keeps_the_time_limit():
    env = Staggered(Clock(4), num_envs=9)
    agent, params = zero_agent(Clock())
    result = jax.jit(lambda key: evaluate(env, agent, params, None, key))(jax.random.key(0))
    np.testing.assert_array_equal(result.length, np.minimum(np.arange(1, 10), 4))
    assert np.all(result.ended)


def test_an_evaluation_uses_the_statistics():
    env = Staggered(Clock(), num_envs=5)
    agent, params = zero_agent(Clock())
    params["policy_head"]["kernel"] = jnp.array([[-1.0, 1.0], [0.0, 0.0]])  # 1 where it is positive

    @jax.jit
    def score(mean):
        moments = stats.Moments(jnp.array(1.0), jnp.stack([mean, 0.0]), jnp.ones(2), jnp.array(0.0))
        return evaluate(env, agent, params, moments, jax.random.key(0)).score

    lengths = np.arange(1, 6)
    np.testing.assert_allclose(score(5.0), clock_score(lengths, 1), rtol=1e-5)
    np.testing.assert_allclose(score(25.0), clock_score(lengths, 0), rtol=1e-5)


def test_an_evaluation_may_sample():
    env = Staggered(Clock(), num_envs=9)
    agent, params = zero_agent(Clock())

    @jax.jit
    def scores(key):
        return evaluate(env, agent, params, None, key, sampled=True).score

    lengths = np.arange(1, 10)
    actions = scores(jax.random.key(0)) - clock_score(lengths, 0)
    assert 0.25 < actions.sum() / lengths.sum() < 0.75  # all logits are equal
    np.testing.assert_array_equal(scores(jax.random.key(0)), scores(jax.random.key(0)))
    assert np.any(scores(jax.random.key(0)) != scores(jax.random.key(1)))


def test_an_evaluation_gives_up_an_episode_without_end(monkeypatch):
    monkeypatch.setattr(evaluate_module, "MAX_STEPS", 6)
    env = Staggered(Clock(), num_envs=9)
    agent, params = zero_agent(Clock())
    result = jax.jit(lambda key: evaluate(env, agent, params, None, key))(jax.random.key(0))
    np.testing.assert_array_equal(result.ended, np.arange(1, 10) <= 6)
    np.testing.assert_array_equal(result.length, np.minimum(np.arange(1, 10), 6))


def test_an_episode_that_an_invalid_step_ended_does_not_count():
    env = Vectorized(Poisoned(poison="reward"), num_envs=32)
    agent = make_setup(Config(torso_layers=()), env.env).agent
    shapes = jax.eval_shape(agent.init, jax.random.key(0), Hyper())
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    result = jax.jit(lambda key: evaluate(env, agent, params, None, key))(jax.random.key(0))
    np.testing.assert_array_equal(result.length, np.where(result.ended, 6, 3))
    assert 0 < result.ended.sum() < 32
    assert np.isfinite(result.score[result.ended]).all()


def test_episodes_begin_otherwise_than_a_training_with_their_seed():
    setup = make_setup(Config(num_envs=64))
    trained = ppo.init(setup, jax.random.key(0), Hyper()).env_state.obs
    _, keys = split_keys(key_of(0), setup.env.num_envs)
    begun = setup.env.reset(keys).obs
    assert not (np.asarray(trained)[:, None] == np.asarray(begun)).all(-1).any()
