"""Whole trainings: sweeps, chunks and padding are all the same computation."""

import dataclasses
import logging

import chex
import jax
import numpy as np
import pytest
from probes import Bits, Poisoned, TimeLimit
from trainings import quickly

from purejaxppo import envs
from purejaxppo.config import Config, Hyper
from purejaxppo.envs.base import Vectorized
from purejaxppo.plan import (
    MAX_CHUNK,
    Plan,
)
from purejaxppo.policy import act
from purejaxppo.stats import init_moments
from purejaxppo.train import Trainer, make_setup, make_train, stack_hypers
from purejaxppo.values import ConfigError

CONFIG = Config(
    num_envs=4,
    num_steps=8,
    num_minibatches=2,
    torso_layers=(8,),
    normalize_observations=True,
    normalize_rewards=True,
    total_timesteps=2 * 32,
)
# Around 1: where observations are far from it tanh saturates, and its derivative is all rounding.
WALK = Poisoned(scale=0.02)
SEEDS = [5, 6, 7]
HYPERS = [
    Hyper(learning_rate=0.01, gamma=0.99),
    Hyper(learning_rate=0.003, gamma=0.9),
    Hyper(learning_rate=0.03, gamma=0.5),
]


def test_act_is_the_same_within_jit_and_vmap():
    env = envs.make("CartPole-v1")
    setup = make_setup(dataclasses.replace(CONFIG, env="CartPole-v1"))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = jax.eval_shape(setup.agent.init, keys[0], Hyper())
    draw = np.random.default_rng(0).normal  # compiles nothing
    params = jax.tree.map(lambda x: draw(0, 0.5, (3, *x.shape)).astype(np.float32), shapes)
    stats = init_moments(env.observation_space.shape)
    obs = draw(size=(3, 16, 4)).astype(np.float32)

    def acts(params, obs, key):
        return act(setup.agent, params, stats, obs), act(setup.agent, params, stats, obs, key)

    with pytest.raises(ValueError, match=r"obs \[4\]: must be \[B, 4\]"):
        act(setup.agent, params, stats, obs[0, 0])
    together = jax.jit(jax.vmap(acts))(params, obs, keys)
    for i, key in enumerate(keys):
        own = jax.tree.map(lambda x, i=i: x[i], params)
        for each, alone in zip(together, acts(own, obs[i], key), strict=True):
            assert alone.shape == (16,)
            assert set(np.asarray(alone)) == {0, 1}
            np.testing.assert_array_equal(each[i], alone)
    assert (together[0] != together[1]).any()  # one is sampled


@pytest.fixture
def quick():
    with quickly():
        yield


class Sweep:
    """A trainer with its runs, so that several results come from one compiled program."""

    def __init__(self, plan):
        self.trainer = Trainer(make_setup(CONFIG, WALK), plan)

    def train(self, seeds, hypers, counts=(2,), trainer=None):
        """Parameters [R, ...] after chunks of so many iterations, and their metrics."""
        by = trainer or self.trainer  # that lays out the runs
        hypers = by.shard(stack_hypers(hypers))
        states = self.trainer.init(by.shard(np.array(seeds, np.uint32)), hypers, ())
        metrics = []
        for count in counts:
            shared = (np.int32(count), np.float32(CONFIG.iterations))
            states, rows = self.trainer.chunk(states, hypers, shared)
            metrics.append(jax.tree.map(lambda x, n=count: x[:, :n], by.fetch(rows)))
        metrics = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *metrics)
        return by.fetch((states.params, states.obs_stats)), metrics


@pytest.fixture(scope="module")
def together():
    """The three runs one after another: blocks of one."""
    return Sweep(Plan(num_runs=3, num_devices=1, block=1))


@pytest.fixture(scope="module")
def trained(together):
    return together.train(SEEDS, HYPERS)


def run_of(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def relative_distance(a, b):
    """The greatest over arrays of |a - b| / |b|, each over a whole array."""
    norms = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), a, b)
    return max(jax.tree.leaves(norms))


def test_runs_differ(trained):
    (params, _), _ = trained
    for i, j in ((0, 1), (1, 2), (0, 2)):
        assert relative_distance(run_of(params, i), run_of(params, j)) > 1e-2


def test_a_run_of_a_sweep_is_that_run_alone_bit_for_bit(trained):
    alone = Sweep(Plan(num_runs=1, num_devices=1, block=1))
    for i in range(3):
        result = alone.train([SEEDS[0] + i], [HYPERS[i]])
        chex.assert_trees_all_equal(run_of(trained, i), run_of(result, 0))


@pytest.fixture(scope="module")
def in_pairs():
    return Sweep(Plan(num_runs=3, num_devices=1, block=2))


@pytest.mark.on_cpus
@pytest.mark.parametrize(("num_devices", "padded"), [(2, 4), (8, 8)])
def test_the_number_of_devices_does_not_change_the_bits(trained, num_devices, padded):
    plan = Plan(num_runs=3, num_devices=num_devices, block=1)
    assert plan.padded == padded
    chex.assert_trees_all_equal(Sweep(plan).train(SEEDS, HYPERS), trained)


@pytest.mark.on_cpus
def test_the_number_of_devices_does_not_change_the_bits_of_a_block(in_pairs):
    """On several: on one alone XLA adds returns, which scale rewards, of vmapped runs in another order."""
    plans = (Plan(num_runs=3, num_devices=n, block=2) for n in (2, 4))
    on_two, on_four = (Sweep(plan).train(SEEDS, HYPERS) for plan in plans)
    chex.assert_trees_all_equal(on_two, on_four)
    chex.assert_trees_all_close(on_two, in_pairs.train(SEEDS, HYPERS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learning_rate", [1e3, 1e38])
def test_a_diverging_run_does_not_touch_its_neighbours(in_pairs, learning_rate):
    """Not even those in its block."""
    (params, _), metrics = in_pairs.train(SEEDS, HYPERS)
    wild = [HYPERS[0].replace(learning_rate=learning_rate, max_grad_norm=1e38), *HYPERS[1:]]
    (wild_params, _), wild_metrics = in_pairs.train(SEEDS, wild)
    assert relative_distance(run_of(wild_params, 0), run_of(params, 0)) > 1 or np.isnan(
        wild_metrics.policy_loss[0, -1]
    )
    for run in (1, 2):
        chex.assert_trees_all_equal(run_of(wild_params, run), run_of(params, run))
        chex.assert_trees_all_equal(run_of(wild_metrics, run), run_of(metrics, run))


@pytest.mark.usefixtures("quick")
def test_the_swept_gamma_is_that_of_reward_scaling():
    """A reward of 1 a step for ever: after t steps the discounted return is (1 - g^t) / (1 - g)."""
    gammas = np.array([0.5, 0.9, 1.0])
    trainer = Trainer(
        make_setup(CONFIG, TimeLimit(max_episode_steps=None)),
        Plan(num_runs=3, num_devices=1, block=3),
    )
    hypers = trainer.shard(stack_hypers([Hyper(gamma=float(g)) for g in gammas]))
    states = trainer.init(trainer.shard(np.zeros(3, np.uint32)), hypers, ())
    states, _ = trainer.chunk(states, hypers, (np.int32(2), np.float32(2)))
    returns = np.cumsum(gammas[:, None] ** np.arange(2 * CONFIG.num_steps), axis=1)
    moments = trainer.fetch(states.return_stats.moments)
    np.testing.assert_allclose(moments.mean, returns.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(moments.var, returns.var(axis=1), rtol=1e-4)


def test_padding_does_not_change_results(in_pairs):
    padded = in_pairs.train(SEEDS, HYPERS)
    assert all(len(leaf) == 3 for leaf in jax.tree.leaves(padded))
    full = Trainer(in_pairs.trainer.setup, Plan(num_runs=4, num_devices=1, block=2))
    four = in_pairs.train([*SEEDS, 99], [*HYPERS, Hyper()], trainer=full)
    chex.assert_trees_all_equal(padded, jax.tree.map(lambda x: x[:3], four))


def test_the_block_changes_rounding_only(trained, in_pairs):
    (params, obs_stats), metrics = in_pairs.train(SEEDS, HYPERS)
    (expected, expected_stats), expected_metrics = trained
    assert relative_distance(params, expected) < 1e-4
    chex.assert_trees_all_close(obs_stats, expected_stats, rtol=1e-4)
    np.testing.assert_allclose(metrics.entropy, expected_metrics.entropy, rtol=1e-4)


def test_the_whole_training_as_one_function_of_key_and_hyper(trained):
    keys = jax.vmap(jax.random.key)(np.array(SEEDS, np.uint32))
    as_there = {"xla_backend_optimization_level": 1}  # rounding grows in two iterations
    train = jax.jit(jax.vmap(make_train(CONFIG, WALK)), compiler_options=as_there)
    state, metrics = train(keys, stack_hypers(HYPERS))
    assert {x.shape for x in jax.tree.leaves(metrics)} == {(3, 2)}
    rates = np.array([[0.01], [0.003], [0.03]]) * [1.0, 0.5]  # annealed over 2 iterations
    np.testing.assert_allclose(metrics.learning_rate, rates, rtol=1e-6)
    assert np.all(state.iteration == 2)
    (expected, _), expected_metrics = trained
    assert relative_distance(state.params, expected) < 1e-4
    np.testing.assert_allclose(metrics.value_loss, expected_metrics.value_loss, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize_advantages": "minbatch"}, "normalize_advantages: 'minbatch' is not one of"),
        ({"num_envs": 0}, "--num-envs 0: must be at least 1"),
        ({"num_minibatches": 3}, "is not divisible by --num-minibatches 3"),
        ({"num_minibatches": CONFIG.batch_size}, "a minibatch of one sample has no advantage"),
        (
            {"normalize_advantages": "batch", "num_envs": 1, "num_steps": 1, "num_minibatches": 1},
            "a batch of one sample has no .*; add --normalize-advantages off",
        ),
        ({"torso_layers": "64"}, "torso_layers: '64' is not a list of whole numbers"),
    ],
)
def test_a_configuration_made_in_python_is_validated(options, message):
    with pytest.raises(ConfigError, match=message):
        make_train(dataclasses.replace(CONFIG, **options))


@pytest.mark.parametrize("limit", [0, -3, 5.0, True, 2**31])
def test_an_environment_made_in_python_is_checked(limit):
    env = envs.make("CartPole-v1")
    env.max_episode_steps = limit
    with pytest.raises(
        ConfigError, match=r"GymnaxEnvironment: its max_episode_steps is .*: must be"
    ):
        make_train(CONFIG, env)


def test_an_environment_made_in_python_has_to_give_what_the_protocol_says():
    class Mistaken(type(WALK)):
        def reset(self, key):
            return super().reset(key)[0], {}

    with pytest.raises(ConfigError, match="Mistaken: its reset's obs is a dict"):
        make_train(CONFIG, Mistaken())
    with pytest.raises(ConfigError, match="it has no observation_space"):
        make_train(CONFIG, "Acrobot-v1")


def test_an_environment_made_in_python_may_be_in_gymnax_style_and_is_called_by_its_name():
    from gymnax.environments.classic_control import CartPole

    assert callable(make_train(CONFIG, CartPole()))
    assert make_setup(CONFIG, CartPole()).env.observation_space.shape == (4,)
    with pytest.raises(ConfigError, match="does not fit the observations of CartPole, "):
        make_train(dataclasses.replace(CONFIG, cnn_layers=((4, 3, 1),)), CartPole())


def test_hyperparameters_made_in_python_are_validated():
    with pytest.raises(ConfigError, match=r"--gamma 99.0: must be in 0 \.\.\. 1"):
        stack_hypers([Hyper(), Hyper(gamma=99.0)])


def test_a_users_own_axis_is_not_that_of_the_devices():
    keys = jax.random.split(jax.random.key(0), 2)
    train = make_train(CONFIG, WALK)
    one, other = (
        jax.make_jaxpr(jax.vmap(lambda key: train(key, Hyper()), axis_name=name))(keys)
        for name in ("seeds", "environments")
    )
    assert str(one) == str(other)


@pytest.mark.parametrize("env", ["Pendulum-v1", "FourRooms-misc"])
def test_made_within_jit(env):
    """Whatever an environment computes of itself is known while it is traced."""
    config = dataclasses.replace(CONFIG, env=env)
    within = jax.eval_shape(lambda key: make_train(config)(key, Hyper()), jax.random.key(0))
    assert within == jax.eval_shape(make_train(config), jax.random.key(0), Hyper())


def test_options_of_both_kinds_that_do_not_go_together_are_refused_in_python():
    train = make_train(CONFIG)
    with pytest.raises(ConfigError, match="both set the learning rate"):
        jax.eval_shape(train, jax.random.key(0), Hyper(desired_kl=0.01))
    train = make_train(dataclasses.replace(CONFIG, anneal_learning_rate=False))
    with pytest.raises(ConfigError, match="--target-kl ends an iteration before --desired-kl"):
        jax.eval_shape(train, jax.random.key(0), Hyper(desired_kl=0.01, target_kl=0.1))


def test_keys_of_the_older_kind_are_the_same_training():
    state, _ = jax.eval_shape(make_train(CONFIG), jax.random.PRNGKey(3), Hyper())
    assert state.key.dtype == jax.random.key(0).dtype


@pytest.mark.parametrize("hypers", [[], [Hyper(), Hyper(target_kl=0.1)]])
def test_hypers_that_cannot_be_stacked(hypers):
    with pytest.raises(ConfigError, match="at least one, and all with the same"):
        stack_hypers(hypers)


def test_whole_numbers_may_be_written_as_floats_in_python():
    config = dataclasses.replace(CONFIG, total_timesteps=1e2)
    assert make_setup(config).config.total_timesteps == 100


def test_double_precision_is_refused():
    with jax.enable_x64(True), pytest.raises(ConfigError, match="JAX_ENABLE_X64"):
        make_train(CONFIG)


def test_chunks_of_a_training_are_the_training(together, trained):
    chunks = together.train(SEEDS, HYPERS, counts=(1, 1))
    chex.assert_trees_all_equal(chunks, trained)


def test_a_chunk_leaves_the_rest_of_its_metrics_blank(together):
    hypers = together.trainer.shard(stack_hypers(HYPERS))
    states = together.trainer.init(together.trainer.shard(np.array(SEEDS, np.uint32)), hypers, ())
    states, metrics = together.trainer.chunk(states, hypers, (np.int32(0), np.float32(2)))
    assert np.all(states.iteration == 0)
    assert {x.shape for x in jax.tree.leaves(metrics)} == {(3, MAX_CHUNK)}
    assert not any(np.any(x) for x in jax.tree.leaves(metrics))


@pytest.fixture
def compiled(caplog):
    """Of what JAX says while it compiles: the programs so far, traced or compiled, by message."""
    caplog.set_level(logging.DEBUG, logger="jax")

    def count(what):
        return sum(record.getMessage().startswith(what) for record in caplog.records)

    with jax.log_compiles():
        yield lambda: (count("Finished tracing blocks"), count("Compiling jit(blocks)"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_everything_is_compiled_once(name, compiled):
    config = dataclasses.replace(CONFIG, env=name, num_envs=2, num_steps=4)
    setup = make_setup(config)
    eval_env = Vectorized(setup.env.env, 3)
    trainer = Trainer(setup, Plan(num_runs=1, num_devices=1, block=1), eval_env)
    hypers = trainer.shard(stack_hypers([Hyper()]))
    states = trainer.init(trainer.shard(np.array([0], np.uint32)), hypers, ())
    assert compiled() == (1, 1)
    for count in (2, 2, 1):  # a shorter last chunk too
        shared = (np.int32(count), np.float32(5))
        states, _ = trainer.chunk(states, hypers, shared)
        episodes = trainer.evaluate(states, hypers, ())
        assert compiled() == (3, 3)
    assert np.all(states.iteration == 5)
    assert episodes.score.shape == (1, 3)
    assert np.all(episodes.ended)
    chex.assert_trees_all_equal(trainer.evaluate(states, hypers, ()), episodes)


@pytest.mark.parametrize(("platform", "backend"), [("cuda", "gpu"), ("tpu", "tpu")])
@pytest.mark.parametrize(
    ("env", "options"),
    [
        (None, {"env": "MountainCarContinuous-v0"}),
        (Bits(), {}),
        (Bits(), {"gru_units": 4}),
    ],
)
def test_programs_are_lowered_for_accelerators(env, options, platform, backend, monkeypatch):
    """With the branches that those take, and without a call of what only a CPU has."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = dataclasses.replace(CONFIG, **options)
    trainer = Trainer(make_setup(config, env), Plan(num_runs=2, num_devices=1, block=2))
    start = (np.zeros(2, np.uint32), stack_hypers([Hyper()] * 2), ())
    states = jax.eval_shape(trainer.init, *start)
    later = (states, start[1], (np.int32(1), np.float32(1)))
    for program, arguments in [
        (trainer.init, start),
        (trainer.chunk, later),
        (trainer.evaluate, (states, start[1], ())),
    ]:
        lowered = program.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.while" in lowered
        assert "custom_call" not in lowered


def test_shard_repeats_the_last_run_and_fetch_takes_it_off():
    trainer = Trainer(make_setup(CONFIG, TimeLimit()), Plan(num_runs=3, num_devices=1, block=2))
    there = trainer.shard({"x": np.array([1.0, 2.0, 3.0])})
    np.testing.assert_array_equal(there["x"], [1.0, 2.0, 3.0, 3.0])
    np.testing.assert_array_equal(trainer.fetch(there)["x"], [1.0, 2.0, 3.0])
