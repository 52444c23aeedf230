"""The algorithm: learning what is known in closed form, and each rule of it by itself."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from iterations import SMALL, advantages, apply, iterate, jit, roll, rollout, setup_and_state
from probes import (
    ActionReward,
    Clock,
    ConstantReward,
    ContinuousTarget,
    DelayedReward,
    Misshapen,
    ObservationReward,
    Poisoned,
    TimeLimit,
)
from test_losses import numpy_gae
from test_shuffles import permutations

from purejaxppo import loop, ppo, rollouts, stats
from purejaxppo.agent import Agent
from purejaxppo.config import Config, Hyper
from purejaxppo.envs.base import Vectorized
from purejaxppo.losses import LossMetrics
from purejaxppo.train import as_arrays, make_setup, make_train
from purejaxppo.types import Episode, Final, Rollout, Transition
from purejaxppo.updates import UpdateMetrics


def learn(env, **options):
    """(agent's output as a function of observations, metrics) after 50 iterations."""
    config = Config(**SMALL, total_timesteps=50 * 64, **options)
    hyper = Hyper(learning_rate=0.03, gamma=0.9, ent_coef=0.0, init_log_std=-1.0)
    state, metrics = jit(make_train(config, env))(jax.random.key(0), hyper)
    agent = make_setup(config, env).agent

    def ask(obs):
        obs = jnp.asarray(obs)[:, None]
        return agent.apply(state.params, None, obs, (), jnp.ones(len(obs), bool))

    return ask, metrics


def test_learns_the_value_of_a_constant_reward():
    ask, metrics = learn(ConstantReward())
    np.testing.assert_allclose(ask([1.0]).value, [1.0], atol=0.01)
    np.testing.assert_array_equal(metrics.episode_return, 1.0)
    np.testing.assert_array_equal(metrics.episodes, 64)
    np.testing.assert_allclose(metrics.value_mean[-1], 1.0, atol=0.01)
    # The learning rate falls linearly and is constant within an iteration.
    np.testing.assert_allclose(
        metrics.learning_rate, 0.03 * (1 - np.arange(50) / 50), rtol=1e-6, atol=3e-9
    )


def test_learns_a_value_that_depends_on_the_observation():
    ask, _ = learn(ObservationReward())
    np.testing.assert_allclose(ask([-1.0, 2.0]).value, [-1.0, 2.0], atol=0.02)


def test_learns_the_action_that_the_observation_asks_for():
    ask, metrics = learn(ActionReward())
    output = ask([-1.0, 1.0])
    probabilities = jax.nn.softmax(output.policy.logits)
    assert probabilities[0, 0] > 0.98
    assert probabilities[1, 1] > 0.98
    np.testing.assert_allclose(output.value, [1.0, 1.0], atol=0.02)
    assert metrics.entropy[0] > 0.6 > 0.1 > metrics.entropy[-1]


def test_discounts_a_delayed_reward():
    ask, metrics = learn(DelayedReward())
    np.testing.assert_allclose(ask([0.0, 1.0]).value, [0.9, 1.0], atol=0.01)
    assert metrics.episode_length[-1] == 2
    assert metrics.explained_variance[-1] > 0.95


def test_a_time_limit_is_not_the_end_of_the_task():
    ask, metrics = learn(TimeLimit())
    # 1 / (1 - 0.9); as if it were the end, the mean of 1, 1.9 and 2.71.
    np.testing.assert_allclose(ask([1.0]).value, [10.0], atol=0.2)
    assert metrics.episode_length[-1] == 3


def test_termination_wins_where_the_time_is_up_as_well():
    ask, _ = learn(TimeLimit(terminal=True, max_episode_steps=1))
    np.testing.assert_allclose(ask([1.0]).value, [1.0], atol=0.01)


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
def test_learns_a_continuous_action_in_an_asymmetric_box(distribution):
    ask, metrics = learn(ContinuousTarget(), action_distribution=distribution)
    output = ask([1.0])
    np.testing.assert_allclose(output.policy.to_env(output.policy.mode()), [[0.3]], atol=0.03)
    np.testing.assert_allclose(output.value, [0.0], atol=0.02)
    assert metrics.episode_return[-1] > -0.01 > metrics.episode_return[0]


NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
# With a single update in an iteration, every ratio of it is one.
SINGLE_UPDATE = {"num_minibatches": 1, "update_epochs": 1}


def first_ratio(setup, state, steps):
    """Max |ratio - 1| of a rollout's actions, in minibatches of shuffled samples."""
    order = permutations(1, 1, setup.config.batch_size).reshape(2, -1)

    def ratio(index):
        obs, action, log_prob, first = (
            x.reshape(-1, *x.shape[2:])[index]
            for x in (steps.obs, steps.action, steps.log_prob, steps.first)
        )
        output = setup.agent.apply(state.params, state.obs_stats, obs, state.carry, first)
        return jnp.exp(output.policy.log_prob(action) - log_prob)

    return max(float(jnp.max(jnp.abs(jax.jit(ratio)(index) - 1))) for index in order)


def test_the_first_ratio_is_one():
    env = Poisoned()  # without poison: a walk around 50
    options = NORMALIZED | SINGLE_UPDATE
    setup, state, hyper = setup_and_state(env, Hyper(learning_rate=0.05), **options)
    for _ in range(3):
        state, _ = iterate(setup, state, hyper, 10.0)
    acted, data = rollout(setup, state, jax.random.key(5))
    assert first_ratio(setup, acted, data.transitions) < 1e-5
    updated = jit(ppo.update_statistics)(acted, data.transitions, hyper)
    assert first_ratio(setup, updated, data.transitions) > 1e-3


@pytest.mark.parametrize("options", [{}, {"shared_torso": True}, {"num_steps": 6}])
def test_values_are_those_of_the_network_that_acted(options):
    setup, state, hyper = setup_and_state(
        Poisoned(), Hyper(learning_rate=0.05), **NORMALIZED | options
    )
    state, _ = iterate(setup, state, hyper, 10.0)
    steps = rollout(setup, state, jax.random.key(5))[1].transitions
    values = apply(setup.agent, state.params, state.obs_stats, steps.obs, (), steps.first).value
    np.testing.assert_allclose(steps.value, values, rtol=1e-5)
    assert np.ptp(values) > 0.01


def test_an_iteration_takes_its_loss_with_the_statistics_that_acted():
    options = NORMALIZED | SINGLE_UPDATE
    setup, state, hyper = setup_and_state(Poisoned(), Hyper(learning_rate=0.05), **options)
    for i in range(4):
        before = state.obs_stats, stats.return_scale(state.return_stats)
        state, metrics = iterate(setup, state, hyper, 10.0)
        assert abs(metrics.approx_kl) < 1e-7
        assert metrics.clip_fraction == 0
        # Normalised advantages have a mean of 0, and so has the surrogate at a ratio of one.
        assert abs(metrics.policy_loss) < 1e-5
        assert state.obs_stats.count == before[0].count + 64 == 64 * (i + 1)
        assert stats.return_scale(state.return_stats) != before[1]


def test_rewards_are_scaled_by_the_return_statistics_that_acted():
    setup, state, hyper = setup_and_state(Poisoned(), **NORMALIZED)
    moments = stats.Moments(jnp.array(9.0), jnp.array(3.0), jnp.array(16.0), jnp.array(0.0))
    state = state.replace(return_stats=stats.ReturnStats(moments, jnp.zeros(8)))
    state, data = rollout(setup, state, jax.random.key(0))
    scaled = advantages(setup, state, data, hyper.replace(gamma=jnp.zeros(())))
    expected = data.transitions.reward / 4 - data.transitions.value
    np.testing.assert_allclose(scaled, expected, rtol=0, atol=1e-5)


def test_rewards_are_multiplied_for_learning_and_scores_are_not():
    setup, state, hyper = setup_and_state(Clock(3))
    state, data = rollout(setup, state, jax.random.key(0))
    steps, hyper = data.transitions, hyper.replace(gamma=jnp.zeros(()))
    for scale in (0.1, 5.0):
        scaled = advantages(setup, state, data, hyper.replace(reward_scale=jnp.float32(scale)))
        np.testing.assert_allclose(scaled, scale * steps.reward - steps.value, rtol=0, atol=1e-4)
    ended, score, length = (np.asarray(x)[2] for x in jax.tree.leaves(data.episodes))
    whole = ended & (length == 3)  # of those that end at the third step
    assert whole.any()
    np.testing.assert_allclose(score[whole], steps.reward[:3].sum(0)[whole], rtol=1e-6)


def test_the_return_trace_follows_the_gamma_of_the_run():
    setup, state, hyper = setup_and_state(Poisoned(), Hyper(gamma=0.5), **NORMALIZED)
    acted, data = rollout(setup, state, jax.random.key(0))
    steps = data.transitions
    for gamma in (0.5, 0.9):
        trace = np.zeros(8)
        for reward, ended in zip(steps.reward, steps.terminated | steps.truncated, strict=True):
            trace = np.where(ended, 0.0, gamma * trace + reward)
        updated = ppo.update_statistics(acted, steps, hyper.replace(gamma=jnp.float32(gamma)))
        np.testing.assert_allclose(updated.return_stats.trace, trace, rtol=1e-5)
    assert np.all(updated.return_stats.trace > 0)


def test_a_run_begins_with_statistics_that_change_nothing():
    setup, state, _ = setup_and_state(Poisoned(), **NORMALIZED)
    assert isinstance(setup.agent, Agent)
    chex.assert_trees_all_equal(state.obs_stats, stats.init_moments((3,)))
    chex.assert_trees_all_equal(state.return_stats, stats.init_return_stats(8))
    assert np.all(state.first)
    assert state.iteration == 0
    _, plain, _ = setup_and_state(Poisoned())
    assert plain.obs_stats is None
    assert plain.return_stats is None


# (time limit, whether the environment truncates by itself, steps of a rollout)
CLOCKS = [
    (3, False, 7),  # T not a multiple of L
    (3, False, 6),
    (5, False, 5),
    (9, False, 4),  # L > T
    (1, False, 3),
    (None, False, 6),  # K = 0
    (None, True, 6),  # K = T
    (4, True, 6),
]


@pytest.mark.parametrize(("limit", "may_truncate", "num_steps"), CLOCKS)
def test_final_observations_and_the_values_that_follow(limit, may_truncate, num_steps):
    env = Clock(limit, may_truncate)
    setup, state, _ = setup_and_state(env, num_steps=num_steps)
    hyper = as_arrays(Hyper(gamma=0.9, gae_lambda=0.7))

    @jit
    def several(state, keys):
        def one(state, key):
            state, data = roll(setup, state, key)
            return state, (data, rollouts.advantages(setup, state, data, hyper))

        return jax.lax.scan(one, state, keys)

    final, (data, advantage) = several(state, jax.random.split(jax.random.key(1), 4))
    obs, clock, terminated, truncated = simulate(env, data.transitions, num_steps)
    np.testing.assert_array_equal(final.env_state.obs[:, 0], clock)
    assert terminated.any() or limit == 1 or may_truncate
    assert truncated.any() == bool(limit or may_truncate)

    window = 1 if may_truncate else limit
    slots = -(-num_steps // window) if window else 0
    assert data.final.obs.shape == (4, slots, 8, 2)
    after = obs + np.array([1.0, 0.0])  # what a step led to, whether or not the episode ended
    i, t, n = np.nonzero(truncated)
    if slots:
        np.testing.assert_array_equal(data.final.obs[i, t // window, n], after[i, t, n])

    first = jnp.zeros(after.shape[:3], bool)
    next_value = apply(setup.agent, state.params, None, jnp.float32(after), (), first).value
    steps = data.transitions
    for i in range(4):
        expected = numpy_gae(
            np.asarray(steps.reward[i], np.float64),
            np.asarray(steps.value[i], np.float64),
            np.asarray(next_value[i], np.float64),
            terminated[i],
            truncated[i],
            0.9,
            0.7,
        )
        np.testing.assert_allclose(advantage[i], expected, rtol=0, atol=1e-4)


def simulate(env, steps, num_steps):
    """The rollouts of a Clock again in plain Python, in which only the lifetimes are looked up.

    Checks the transitions against it, and returns what was seen, the clocks at the end [N], and
    terminated and truncated, each [rollout, T, N].
    """
    obs = np.asarray(steps.obs)
    terminated, truncated = np.zeros((2, *obs.shape[:3]), bool)
    clock = np.full(obs.shape[2], env.START)
    first = np.ones(obs.shape[2], bool)
    for i, t in np.ndindex(*obs.shape[:2]):
        np.testing.assert_array_equal(steps.first[i, t], first)
        np.testing.assert_array_equal(obs[i, t, :, 0], clock)
        life = obs[i, t, :, 1]
        clock = clock + 1
        over = clock - env.START >= life
        late = clock - env.START >= (env.max_episode_steps or np.inf)
        terminated[i, t] = over & (not env.may_truncate)
        truncated[i, t] = late | (over & env.may_truncate)
        first = over | late
        clock = np.where(first, env.START, clock)
        if t + 1 < num_steps:
            np.testing.assert_array_equal(obs[i, t + 1, ~first, 1], life[~first])
    np.testing.assert_array_equal(steps.terminated, terminated)
    np.testing.assert_array_equal(steps.truncated, truncated)
    return obs, clock, terminated, truncated


def test_clipped_rewards_are_learnt_from_and_true_ones_reported():
    @dataclasses.dataclass(frozen=True)
    class Dear(TimeLimit):
        """Earns 5 and -3 in turn."""

        def step(self, key, state, action):
            _, timestep = super().step(key, state, action)
            return state + 1, timestep.replace(reward=jnp.where(state % 2 == 0, 5.0, -3.0))

    options = {"num_steps": 9, "num_minibatches": 1, "normalize_rewards": True}
    setup, state, hyper = setup_and_state(Dear(4), Hyper(reward_clip=2.0), **options)
    after, data = rollout(setup, state, jax.random.key(0))
    got = advantages(setup, after, data, hyper)
    clipped = data.transitions.replace(reward=jnp.clip(data.transitions.reward, -2, 2))
    same = Hyper(reward_clip=None)
    expected = advantages(setup, after, data.replace(transitions=clipped), as_arrays(same))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert np.abs(got - advantages(setup, after, data, as_arrays(same))).max() > 1
    ended = np.asarray(data.episodes.ended)
    np.testing.assert_array_equal(data.episodes.score[ended], 4.0)
    # What rewards are divided by is of the clipped ones, too.
    stats = ppo.update_statistics(after, data.transitions, hyper).return_stats
    expected = ppo.update_statistics(after, clipped, as_arrays(same)).return_stats
    chex.assert_trees_all_close(stats, expected)


POISONS = [("reward", float("nan")), ("reward", -float("inf")), ("obs", float("nan"))]
POISONS += [("obs", 1e20), ("reward", -1e20)]  # whose squares are not


@pytest.mark.parametrize(("poison", "value"), POISONS)
def test_a_step_that_is_not_finite_harms_nothing_else(poison, value):
    clean_setup, state, hyper = setup_and_state(Poisoned(), **NORMALIZED)
    setup = make_setup(clean_setup.config, Poisoned(poison=poison, value=value))
    acted, data = rollout(setup, state, jax.random.key(3))
    _, clean = rollout(clean_setup, state, jax.random.key(3))
    steps, bad = data.transitions, np.asarray(state.env_state.obs[:, 2] == 1)
    assert 0 < bad.sum() < 8
    # It is the third step of an episode, which ends there, and the next one begins.
    np.testing.assert_array_equal(steps.valid[2], ~bad)
    np.testing.assert_array_equal(steps.terminated[2], bad)
    assert not np.any(steps.truncated[2])
    np.testing.assert_array_equal(steps.first[3], bad)
    np.testing.assert_array_equal(steps.obs[3, :, 1], np.where(bad, 0, 3))
    np.testing.assert_array_equal(steps.reward[2, bad], 0.0)
    np.testing.assert_array_equal(data.episodes.ended[2], bad)
    np.testing.assert_array_equal(np.isnan(data.episodes.score), ~np.asarray(steps.valid))
    leaves = jax.tree.leaves((steps, data.final))
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
    # The others, and these until then, are what they were.
    unharmed = np.asarray(steps.valid).all(axis=0)
    for actual, expected in zip(
        jax.tree.leaves(steps), jax.tree.leaves(clean.transitions), strict=True
    ):
        np.testing.assert_allclose(actual[:, unharmed], expected[:, unharmed], rtol=1e-6)
        np.testing.assert_allclose(actual[:2], expected[:2], rtol=1e-6)
    # The step before is followed by the value of its observation, and by nothing else.
    reward = steps.reward[1] / stats.return_scale(acted.return_stats)
    expected = reward + hyper.gamma * steps.value[2] - steps.value[1]
    before = advantages(setup, acted, data, hyper)[1]
    np.testing.assert_allclose(before[bad], expected[bad], rtol=1e-4, atol=1e-6)
    valid = np.asarray(steps.valid)
    updated = ppo.update_statistics(acted, steps, hyper)
    samples = np.asarray(steps.obs, np.float64)[valid]
    assert updated.obs_stats.count == updated.return_stats.moments.count == valid.sum()
    np.testing.assert_allclose(updated.obs_stats.mean, samples.mean(0), rtol=1e-5)
    np.testing.assert_allclose(updated.obs_stats.var, samples.var(0), rtol=1e-4)


def test_environments_that_begin_anew_begin_their_returns_anew():
    setup, begun, _ = setup_and_state(Poisoned(), **NORMALIZED)
    acted, data = rollout(setup, begun, jax.random.key(3))
    old = ppo.update_statistics(acted, data.transitions, Hyper())
    assert np.any(old.return_stats.trace)
    new = loop._with_environments(old, begun)
    assert not np.any(new.return_stats.trace)
    assert new.return_stats.moments.count == old.return_stats.moments.count > 0
    chex.assert_trees_all_equal(new.env_state, begun.env_state)


def test_a_run_survives_steps_that_are_not_finite():
    setup, state, hyper = setup_and_state(Poisoned(poison="obs"), **NORMALIZED)
    invalid = 0
    for _ in range(3):
        before = state
        state, metrics = iterate(setup, state, hyper, 3.0)
        invalid += metrics.invalid_steps
        assert np.isfinite(metrics.episode_return)
    assert invalid > 1
    chex.assert_tree_all_finite((state.params, state.opt_state, metrics))
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), state.params, before.params)
    assert all(distance > 0 for distance in jax.tree.leaves(moved))


@pytest.mark.parametrize("field", ["obs", "reward", "terminated", "truncated", "valid"])
def test_an_environment_is_told_which_field_has_the_wrong_shape(field):
    setup = make_setup(Config(**SMALL), Misshapen(field=field))
    with pytest.raises(AssertionError, match=rf"\b{field}\b"):
        trace(setup)


def trace(setup):
    """Traces one iteration from the start of a run."""
    hyper = as_arrays(Hyper())
    state = jax.eval_shape(lambda key: ppo.init(setup, key, hyper), jax.random.key(0))
    jax.eval_shape(lambda state: ppo.iterate(setup, state, hyper, 10.0), state)


@dataclasses.dataclass(frozen=True)
class MisshapenVector(Vectorized):
    """Environments batched by themselves, as a suite may provide them, with an axis too many."""

    field: str = ""

    def step(self, key, state, action):
        state, step, episode = super().step(key, state, action)
        return state, step.replace(**{self.field: getattr(step, self.field)[:, None]}), episode


@pytest.mark.parametrize("field", ["reward", "terminated", "truncated", "valid"])
def test_a_vector_environment_is_told_which_field_has_the_wrong_shape(field):
    setup = make_setup(Config(**SMALL), TimeLimit())
    with pytest.raises(AssertionError, match=rf"\b{field}\b"):
        trace(setup._replace(env=MisshapenVector(TimeLimit(), 8, field=field)))


@dataclasses.dataclass(frozen=True)
class WideAgent(Agent):
    """Its value keeps the axis of the value head."""

    def apply(self, *args):
        output = super().apply(*args)
        return output.replace(value=output.value[..., None])


def test_a_value_of_the_wrong_shape_is_named():
    setup = make_setup(Config(**SMALL), TimeLimit())
    with pytest.raises(AssertionError, match=r"\bvalue\b"):
        trace(setup._replace(agent=WideAgent(**vars(setup.agent))))


def summary_of(value, advantage, ended=False, return_stats=None, valid=True, reward_scale=1.0):
    """The metrics of a rollout [T, N] of which only these are known."""
    value, advantage = jnp.float32(value), jnp.float32(advantage)
    shape = value.shape
    zeros, full = jnp.zeros(shape), lambda x: jnp.broadcast_to(jnp.asarray(x), shape)
    steps = Transition(
        obs=zeros[..., None],
        first=full(False),
        action=full(0),
        noise=zeros[..., None],
        log_prob=zeros,
        value=value,
        reward=zeros,
        terminated=full(ended),
        truncated=full(False),
        valid=full(valid),
    )
    episodes = Episode(full(ended), jnp.arange(value.size).reshape(shape) * 1.0, full(5))
    losses = LossMetrics(*(jnp.array([x, 100.0]) for x in (1.0, 2.0, 3.0, 4.0, 0.5)))
    updates = UpdateMetrics(
        losses, jnp.array([6.0, 100.0]), jnp.array([7.0, 100.0]), jnp.array([True, False])
    )
    setup = make_setup(Config(**SMALL), TimeLimit())
    state = jax.eval_shape(lambda key: ppo.init(setup, key, Hyper()), jax.random.key(0))
    state = state.replace(return_stats=return_stats)
    hyper = Hyper(reward_scale=reward_scale)
    return ppo.summarize(
        state, Rollout(steps, episodes, (), Final(zeros[:0], ())), advantage, updates, hyper
    )


def test_annealing_is_over_after_the_last_iteration():
    setup, state, hyper = setup_and_state(TimeLimit())
    _, metrics = iterate(setup, state.replace(iteration=jnp.int32(9)), hyper, 8.0)
    assert metrics.learning_rate == 0


def test_episodes_are_averaged_over_those_that_ended():
    none = summary_of(np.zeros((2, 2)), np.zeros((2, 2)))
    assert none.episodes == 0
    assert np.isnan(none.episode_return)
    assert np.isnan(none.episode_length)
    some = summary_of(np.zeros((2, 2)), np.zeros((2, 2)), ended=[[True, False], [False, True]])
    assert (some.episodes, some.episode_return, some.episode_length) == (2, 1.5, 5)


def test_values_are_reported_in_units_of_the_environment():
    moments = stats.Moments(jnp.array(9.0), jnp.array(3.0), jnp.array(16.0), jnp.array(0.0))
    value = np.array([[1.0, 2.0], [3.0, 100.0]])
    valid = np.array([[True, True], [True, False]])
    scaled = summary_of(value, value, return_stats=stats.ReturnStats(moments, None), valid=valid)
    np.testing.assert_allclose(scaled.value_mean, 4 * 2.0, rtol=1e-6)
    np.testing.assert_allclose(summary_of(value, value, valid=valid).value_mean, 2.0, rtol=1e-6)
    tenfold = summary_of(value, value, valid=valid, reward_scale=10.0)
    np.testing.assert_allclose(tenfold.value_mean, 0.2, rtol=1e-6)
    assert scaled.invalid_steps == 1


def test_explained_variance():
    target = np.random.default_rng(0).normal(size=(8, 4))
    value = target + np.random.default_rng(1).normal(0, 0.5, size=(8, 4))
    valid = np.random.default_rng(2).random((8, 4)) < 0.7
    expected = 1 - np.var((target - value)[valid]) / np.var(target[valid])
    actual = summary_of(value, target - value, valid=valid).explained_variance
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    assert summary_of(target, np.zeros((8, 4))).explained_variance == 1
    np.testing.assert_allclose(
        summary_of(np.ones((8, 4)), target - 1).explained_variance, 0.0, atol=1e-5
    )
    assert np.isnan(summary_of(np.ones((8, 4)), np.zeros((8, 4))).explained_variance)


def test_updates_that_were_skipped_are_not_averaged():
    metrics = summary_of(np.zeros((2, 2)), np.zeros((2, 2)))
    assert metrics.policy_loss == 1
    assert metrics.value_loss == 2
    assert metrics.entropy == 3
    assert metrics.approx_kl == 4
    assert metrics.clip_fraction == 0.5
    assert metrics.grad_norm == 6
    assert metrics.learning_rate == 7
