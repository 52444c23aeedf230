"""A network with a memory: what it remembers, forgets and learns."""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from iterations import (
    SMALL,
    advantages,
    apply,
    draw,
    jit,
    roll,
    rollout,
    setup_and_state,
    update,
)
from probes import Clock, Poisoned, Recall
from test_losses import numpy_gae

from purejaxppo import rollouts
from purejaxppo.agent import make_agent
from purejaxppo.config import Config, Hyper
from purejaxppo.envs.base import Vectorized
from purejaxppo.evaluate import evaluate
from purejaxppo.networks import Memory
from purejaxppo.policy import Policy, act
from purejaxppo.spaces import Box, Discrete
from purejaxppo.sweep import Run, Setting
from purejaxppo.train import as_arrays, make_setup, make_train

GRU = {"gru_units": 6, "num_steps": 7}


def remembering(env, seed=0, **options):
    """A small training with a memory, whose weights matter."""
    setup, state, hyper = setup_and_state(env, **GRU | options)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: np.float32(rng.normal(0, 0.5, x.shape)), state.params)
    return setup, state.replace(params=params), hyper


def one_by_one(setup, state, steps):
    """The values [T, N] and memories [T, N, H] of steps in a row, one after the other."""
    carry, given = jnp.zeros_like(state.carry), []
    for obs, first in zip(steps.obs, steps.first, strict=True):
        output = apply(setup.agent, state.params, state.obs_stats, obs, carry, first)
        carry = output.carry
        given.append((output.value, carry))
    return jax.tree.map(lambda *x: jnp.stack(x), *given)


def by_environment(obs, carry, first):
    """Steps [T, N, ...] as sequences [N, T, ...]."""
    return jnp.swapaxes(obs, 0, 1), carry, first.T


def test_it_is_flaxs_gated_recurrent_unit_with_its_gradients():
    """And nothing, no gradient either, goes from one episode to the next."""
    rng = np.random.default_rng(0)
    memory, cell = Memory(5), nn.GRUCell(5)
    x, carry = map(np.float32, (rng.normal(size=(4, 6, 3)), rng.normal(size=(4, 5))))
    first = rng.random((4, 6)) < 0.3
    assert 0 < first.sum() < first.size
    shapes = jax.eval_shape(memory.init, jax.random.key(0), x, carry, first)["params"]
    params = jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), shapes)

    def flax(params, carry):
        parts = {"hn": {"bias": params["candidate_bias"]}}
        inputs, own = params["inputs"], params["recurrent_kernel"]
        for i, gate in enumerate("rzn"):
            here = slice(5 * i, 5 * i + 5)
            parts["i" + gate] = {"kernel": inputs["kernel"][:, here], "bias": inputs["bias"][here]}
            parts["h" + gate] = parts.get("h" + gate, {}) | {"kernel": own[:, here]}
        given = []
        for t in range(6):
            carry = jnp.where(first[:, t, None], 0.0, carry)
            carry, _ = cell.apply({"params": parts}, carry, x[:, t])
            given.append(carry)
        return jnp.stack(given, 1)

    def ours(params, carry):
        return memory.apply({"params": params}, x, carry, first)[0]

    weight = rng.normal(size=(4, 6, 5))

    def with_gradients(memory):
        loss = jax.grad(lambda *args: jnp.sum(weight * memory(*args)), (0, 1))
        return jit(lambda *args: (memory(*args), loss(*args)))(params, carry)

    (given, grads), (expected, expected_grads) = map(with_gradients, (ours, flax))
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


def test_steps_in_a_row_are_those_one_by_one_and_an_episode_begins_without_memory():
    setup, state, _ = remembering(Poisoned(scale=0.02), normalize_observations=True)
    after, first = rollout(setup, state, jax.random.key(1))
    _, second = rollout(setup, after, jax.random.key(2))
    steps = jax.tree.map(lambda *x: jnp.concatenate(x), first.transitions, second.transitions)
    value, memory = one_by_one(setup, state, steps)
    at_once = apply(
        setup.agent,
        state.params,
        state.obs_stats,
        *by_environment(steps.obs, state.carry, steps.first),
    )
    np.testing.assert_allclose(at_once.value.T, value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(at_once.carry, memory[-1], rtol=1e-4, atol=1e-5)
    assert steps.first[1:].any()
    np.testing.assert_allclose(steps.value, value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(second.carry, memory[6], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(second.carry, after.carry)
    # As if there had been nothing before.
    t, n = np.argwhere(steps.first[1:])[0] + (1, 0)
    alone = jax.tree.map(lambda x: x[t:, n : n + 1], steps)
    begun = state.replace(carry=state.carry[:1])
    np.testing.assert_allclose(
        one_by_one(setup, begun, alone)[0][:, 0], value[t:, n], rtol=1e-5, atol=1e-6
    )
    forgotten = alone.replace(first=alone.first.at[0].set(False))
    changed = apply(
        setup.agent,
        state.params,
        state.obs_stats,
        forgotten.obs[0],
        memory[t - 1, n : n + 1],
        forgotten.first[0],
    )
    assert abs(float(changed.value[0] - value[t, n])) > 1e-3


@pytest.mark.parametrize(
    "env", [Clock(3), Clock(None, may_truncate=True), Clock(9), Poisoned(scale=0.02)]
)
def test_the_value_after_a_time_limit_is_with_the_memory_before_it(env):
    setup, state, _ = remembering(env)
    hyper = as_arrays(Hyper(gamma=0.9, gae_lambda=0.7))
    state, _ = rollout(setup, state, jax.random.key(1))
    before = state.carry

    @jit
    def observe(state, key):
        after, data = roll(setup, state, key)
        return after, data, rollouts.advantages(setup, after, data, hyper)

    after, data, advantage = observe(state, jax.random.key(2))
    steps, carry = data.transitions, before
    assert env.max_episode_steps == 9 or steps.truncated.any()
    next_value = []
    seen = jnp.concatenate([steps.obs[1:], after.env_state.obs[None]])
    for t in range(len(steps.obs)):
        acted = setup.agent, state.params, None
        carry = apply(*acted, steps.obs[t], carry, steps.first[t]).carry
        final = steps.obs[t] + jnp.array([1.0, 0.0]) if isinstance(env, Clock) else None
        if final is None:  # a walk, of which only the slot knows where it went
            final = data.final.obs[t // env.max_episode_steps]
        ended = (steps.truncated | steps.terminated)[t]
        next_obs = jnp.where(ended[:, None], final, seen[t])
        nothing = jnp.zeros(len(ended), bool)
        next_value.append(apply(*acted, next_obs, carry, nothing).value)
    arrays = steps.reward, steps.value, jnp.stack(next_value)
    expected = numpy_gae(
        *(np.asarray(x, np.float64) for x in arrays), steps.terminated, steps.truncated, 0.9, 0.7
    )
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-3)


def first_update(setup, state, hyper, **changes):
    """Metrics of the update after a rollout of which this was changed."""
    after, data = rollout(setup, state, jax.random.key(3))
    advantage = advantages(setup, after, data, hyper)
    order = draw(setup, jax.random.key(4)).order
    data = data.replace(**changes)
    return update(setup, after, data, advantage, hyper, order)


def test_the_ratio_is_one_with_the_memory_that_acted():
    """In minibatches of sequences that begin in the midst of episodes."""
    setup, state, hyper = remembering(Poisoned(scale=0.02), update_epochs=1)
    hyper = hyper.replace(learning_rate=jnp.float32(1e-20))
    state, _ = rollout(setup, state, jax.random.key(1))
    assert not state.first.all()
    _, metrics = first_update(setup, state, hyper)
    assert metrics.losses.approx_kl.shape == (2,)
    assert np.abs(metrics.losses.approx_kl).max() < 1e-7
    _, metrics = first_update(setup, state, hyper, carry=jnp.zeros_like(state.carry))
    assert metrics.losses.approx_kl.min() > 1e-5


def test_sequences_may_be_learnt_from_in_parts():
    setup, state, hyper = remembering(Poisoned(scale=0.02), update_epochs=1)
    after, data = rollout(setup, state, jax.random.key(3))
    advantage = advantages(setup, after, data, hyper)
    order = draw(setup, jax.random.key(4)).order
    learned = []
    for size in (None, 14, 7):
        config = dataclasses.replace(setup.config, microbatch_size=size)
        in_parts = setup._replace(config=config)
        assert rollouts.num_microbatches(in_parts) == {None: 1, 14: 2, 7: 4}[size]
        learned.append(update(in_parts, after, data, advantage, hyper, order)[0].params)
    for other in learned[1:]:
        chex.assert_trees_all_close(learned[0], other, rtol=1e-4, atol=1e-6)


def test_its_weights_begin_orthogonal():
    setup, state, _ = setup_and_state(Poisoned(), **GRU)
    memory = state.params["memory"]
    for kernel in (memory["inputs"]["kernel"], memory["recurrent_kernel"]):
        assert kernel.shape[1] == 3 * 6
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(len(kernel)), atol=1e-4)
    np.testing.assert_array_equal(memory["candidate_bias"], 0.0)
    assert setup.agent.num_units == 8 + 8 * 6 + 2 + 1


def test_sequences_of_images_are_images_one_by_one():
    """Their gradients too, with the convolutions of this device."""
    space = Box(0, 255, (7, 6, 2), "uint8")
    agent = make_agent(Config(gru_units=4, cnn_layers=((5, 3, 1),)), space, Discrete(3))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(agent.init, jax.random.key(0), Hyper())
    params = jax.tree.map(lambda x: np.float32(rng.normal(0, 0.3, x.shape)), shapes)
    obs = rng.integers(0, 256, (3, 5, 7, 6, 2), np.uint8)
    first, carry = rng.random((3, 5)) < 0.3, np.float32(rng.normal(size=(3, 4)))

    def at_once(params):
        return agent.apply(params, None, obs, carry, first).value

    def one_by_one(params):
        memory, value = carry, []
        for t in range(5):
            output = agent.apply(params, None, obs[:, t], memory, first[:, t])
            memory = output.carry
            value.append(output.value)
        return jnp.stack(value, 1)

    def with_gradients(values):
        loss = jax.grad(lambda params: jnp.sum(values(params) ** 2))
        return jit(lambda params: (values(params), loss(params)))(params)

    (given, grads), (expected, expected_grads) = map(with_gradients, (at_once, one_by_one))
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(grads, expected_grads, rtol=1e-3, atol=1e-4)


def test_a_policy_is_asked_step_by_step():
    setup, state, _ = remembering(Poisoned())
    run = Run(0, 0, Setting({}, setup.config, Hyper()))
    policy = Policy(run, Poisoned(), setup.agent, state.params, None, 0)
    obs = np.random.default_rng(0).normal(size=(2, 4, 3))
    _, memory = policy.step(obs)
    assert memory.shape == (2, 4, 6)
    memory[0] = 0.0  # where an episode begins
    _, after = policy.step(obs, memory)
    np.testing.assert_allclose(after[0], policy.step(obs[0])[1], rtol=1e-5)
    assert np.abs(after[1] - policy.step(obs[1])[1]).max() > 1e-3
    alone = policy.step(obs[1, 2], memory[1, 2])
    np.testing.assert_allclose(alone[1], after[1, 2], rtol=1e-5)
    keys = jax.random.split(jax.random.key(0), 20)
    assert len({int(policy.step(obs[0, 0], key=key)[0]) for key in keys}) == 2
    with pytest.raises(ValueError, match=r"a memory \[6\] is not \[2, 4, 6\]"):
        policy.step(obs, memory[0, 0])
    for ask in (policy, lambda obs: act(setup.agent, state.params, None, obs)):
        with pytest.raises(ValueError, match="this policy has a memory"):
            ask(obs[0])


@pytest.mark.parametrize("units", [None, 8])
def test_what_was_seen_before_is_learned_with_memory_alone(units):
    options = SMALL | {"num_envs": 16, "num_steps": 12, "gru_units": units}
    config = Config(**options, total_timesteps=100 * 192)
    hyper = Hyper(learning_rate=0.02, gamma=0.9, ent_coef=0.0)
    state, metrics = jit(make_train(config, Recall()))(jax.random.key(0), hyper)
    played = jit(evaluate, static_argnums=(0, 1))(
        Vectorized(Recall(), 256), make_setup(config, Recall()).agent, state.params, None,
        jax.random.key(1),
    )  # fmt: skip
    if units:
        assert metrics.episode_return[-1] > 0.95
        np.testing.assert_array_equal(played.score, 1.0)
    else:
        assert 0.3 < played.score.mean() < 0.7
