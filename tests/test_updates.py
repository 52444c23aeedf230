"""Updates beside plain PPO, what their minibatches hold, their schedules and both learning rates."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from iterations import advantages, apply, draw, iterate, jit, rollout, setup_and_state, update
from jax.flatten_util import ravel_pytree
from probes import Clock
from test_shuffles import permutations

from purejaxppo import agent, ppo, rollouts, updates
from purejaxppo.agent import (
    OptState,
    adapt_learning_rate,
    adapted_rates,
    apply_gradients,
    as_vector,
    init_optimizer,
)
from purejaxppo.config import Config, Hyper
from purejaxppo.losses import Minibatch, normalize_advantages, ppo_loss
from purejaxppo.train import make_setup
from purejaxppo.updates import annealed


@pytest.fixture(scope="module")
def experience():
    """(setup, state, data, advantage, hyper): one rollout, to be learnt from in several ways."""
    hyper = Hyper(learning_rate=0.02, value_clip_eps=0.1, max_grad_norm=0.3)
    setup, state, hyper = setup_and_state(Clock(3), hyper)
    state, data = rollout(setup, state, jax.random.key(0))
    return setup, state, data, advantages(setup, state, data, hyper), hyper


def plain_updates(experience, order, normalization, learning_rate):
    """PPO's updates one after another, with optax's own Adam: parameters, states and metrics."""
    setup, state, data, advantage, hyper = experience
    steps = data.transitions
    if normalization == "batch":
        advantage = normalize_advantages(advantage, steps.valid)
    samples = Minibatch(
        obs=steps.obs,
        first=steps.first,
        noise=steps.noise,
        action=steps.action,
        log_prob=steps.log_prob,
        value=steps.value,
        advantage=advantage,
        target=experience[3] + steps.value,
        weight=steps.valid.astype(jnp.float32),
    )
    samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)
    optimizer = optax.chain(
        optax.clip_by_global_norm(hyper.max_grad_norm),
        optax.adam(learning_rate, eps=hyper.adam_eps),
    )

    @jit
    def step(params, opt_state, index):
        batch = jax.tree.map(lambda x: x[index], samples)
        if normalization == "minibatch":
            normalized = normalize_advantages(batch.advantage, batch.weight)
            batch = batch.replace(advantage=normalized)

        def loss(params):
            output = setup.agent.apply(params, None, batch.obs, (), batch.first)
            return ppo_loss(output.policy, output.value, batch, hyper)

        grads, losses = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (
            optax.apply_updates(params, updates),
            opt_state,
            losses,
            jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))),
        )

    history = [(state.params, optimizer.init(state.params), None, None)]
    for index in order:
        history.append(step(*history[-1][:2], index))
    return history


def moments_of(adam):
    """Adam's state as vectors, whatever it is chained with."""
    found = optax.tree_utils.tree_get_all_with_path(adam, "mu")
    assert len(found) == 1
    moments = {name: optax.tree_utils.tree_get(adam, name) for name in ("mu", "nu", "count")}
    return {name: ravel_pytree(moment)[0] for name, moment in moments.items()}


def run_update(experience, hyper, **options):
    setup, state, data, advantage, _ = experience
    config = dataclasses.replace(setup.config, **options)
    order = permutations(7, config.update_epochs, config.batch_size)
    learner, metrics = update(setup._replace(config=config), state, data, advantage, hyper, order)
    minibatches = config.update_epochs * config.num_minibatches
    return learner, metrics, order.reshape(minibatches, -1)


@pytest.mark.parametrize("normalization", ["minibatch", "batch", "off"])
def test_updates_are_those_of_plain_ppo(experience, normalization):
    setup, *_, hyper = experience
    learner, metrics, order = run_update(
        experience, annealed(setup.config, hyper, 0.25), normalize_advantages=normalization
    )
    assert len(order) == len(metrics.grad_norm) == 8
    history = plain_updates(experience, order, normalization, 0.25 * hyper.learning_rate)
    params, adam, _, _ = history[-1]
    chex.assert_trees_all_close(learner.params, params, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
        moments_of(learner.opt_state.adam), moments_of(adam), rtol=1e-3, atol=1e-5
    )
    norms = np.array([norm for *_, norm in history[1:]])
    np.testing.assert_allclose(metrics.grad_norm, norms, rtol=1e-3)
    assert norms.max() > 0.3  # before clipping, which this test is about as well
    np.testing.assert_allclose(metrics.learning_rate, 0.25 * 0.02, rtol=1e-6)
    assert np.all(metrics.applied)


@pytest.mark.parametrize("size", [1, 5, 8])
def test_a_minibatch_may_be_learnt_from_in_parts(experience, size):
    setup, state, data, advantage, hyper = experience
    # Parts differ in how many steps are valid, and each step weighs the same all the same.
    valid = np.random.default_rng(0).random((8, 8)) < np.linspace(0.2, 1, 8)
    data = data.replace(transitions=data.transitions.replace(valid=jnp.asarray(valid)))
    hyper = hyper.replace(
        adam_eps=1e-3
    )  # where a gradient is rounding alone, it makes no step of it
    experience = setup, state, data, advantage, hyper
    whole, expected, _ = run_update(experience, hyper)
    parts, metrics, _ = run_update(experience, hyper, microbatch_size=size)
    config = dataclasses.replace(setup.config, microbatch_size=size)
    assert rollouts.num_microbatches(setup._replace(config=config)) == {1: 32, 5: 8, 8: 4}[size]
    # Adam makes of rounding errors what is still far below its step of 0.02.
    chex.assert_trees_all_close(parts.params, whole.params, rtol=1e-4, atol=2e-4)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "cores", "options", "parts"),
    [
        (2048, 1, {}, 1),
        (4096, 1, {}, 2),
        (4096, 2, {}, 1),
        (3072, 1, {}, 2),
        (2039, 1, {}, 1),
        (4099, 1, {}, 1),  # divisible by nothing
        (16384, 2, {}, 4),
        (16384, 2, {"minibatches": "sequences"}, 4),
        (16384, 1, {"gru_units": 4}, 8),
        (8192, 1, {"microbatch_size": 8192}, 1),
    ],
)
def test_a_cpu_learns_from_what_its_caches_hold(monkeypatch, size, cores, options, parts):
    monkeypatch.setattr("purejaxppo.machine.num_cores", lambda: cores)
    config = Config(num_envs=size, num_steps=1, num_minibatches=1, **options)
    setup = make_setup(config)
    assert rollouts.num_microbatches(setup) == parts
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rollouts.num_microbatches(setup) == 1


def test_target_kl_stops_the_rest_of_the_iteration(experience):
    _, state, data, advantage, hyper = experience
    _, _, order = run_update(experience, hyper)
    history = plain_updates(experience, order, "minibatch", hyper.learning_rate)
    divergence = np.array([losses.approx_kl for _, _, losses, _ in history[1:]])
    stop = 1 + int(np.argmax(divergence[1:5]))
    target = jnp.float32(0.99 * divergence[stop])
    stop = int(np.argmax(divergence > target))
    assert 1 <= stop < 7

    learner, metrics, _ = run_update(experience, hyper.replace(target_kl=target))
    params, adam, _, _ = history[stop]
    chex.assert_trees_all_close(learner.params, params, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
        moments_of(learner.opt_state.adam), moments_of(adam), rtol=1e-3, atol=1e-5
    )
    np.testing.assert_array_equal(metrics.applied, np.arange(8) < stop)
    # It stays stopped, though a later minibatch alone would have been within the target.
    assert np.any(metrics.losses.approx_kl[stop:] < target)
    summary = ppo.summarize(state, data, advantage, metrics, hyper)
    applied = [history[i + 1] for i in range(stop)]
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
        mean = np.mean([getattr(losses, name) for _, _, losses, _ in applied])
        np.testing.assert_allclose(getattr(summary, name), mean, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(
        summary.grad_norm, np.mean([norm for *_, norm in applied]), rtol=1e-3
    )


def test_the_learning_rate_adapts_to_the_divergence_within_bounds():
    hyper = Hyper(learning_rate=1e-3, desired_kl=0.01)

    def rate(rate, approx_kl):
        state = OptState((), jnp.float32(rate / hyper.learning_rate))
        return hyper.learning_rate * adapt_learning_rate(hyper, state, approx_kl).adaptive_scale

    np.testing.assert_allclose(rate(1e-3, 0.021), 1e-3 / 1.5, rtol=1e-5)
    np.testing.assert_allclose(rate(1e-3, 0.019), 1e-3, rtol=1e-5)
    np.testing.assert_allclose(rate(1e-3, 0.006), 1e-3, rtol=1e-5)
    np.testing.assert_allclose(rate(1e-3, 0.004), 1.5e-3, rtol=1e-5)
    np.testing.assert_allclose(rate(1e-3, 0.0), 1e-3, rtol=1e-5)  # has not moved: says nothing
    np.testing.assert_allclose(rate(9e-3, 1e-5), 1e-2, rtol=1e-5)
    np.testing.assert_allclose(rate(1.1e-5, 1.0), 1e-5, rtol=1e-5)


def test_an_adaptive_learning_rate_is_used_and_kept():
    hyper = Hyper(learning_rate=1e-3, desired_kl=1e3)
    setup, state, hyper = setup_and_state(Clock(3), hyper, anneal_learning_rate=False)
    state, metrics = iterate(setup, state, hyper, 10.0)
    # The first minibatch says nothing; then the rate grows by 1.5 until 1e-2 is reached.
    rates = np.minimum(1e-3 * 1.5 ** np.arange(8), 1e-2)
    np.testing.assert_allclose(metrics.learning_rate, rates.mean(), rtol=1e-5)
    np.testing.assert_allclose(state.opt_state.adaptive_scale, 10.0, rtol=1e-5)
    slow = hyper.replace(desired_kl=jnp.float32(1e-9))
    later, metrics = iterate(setup, state, slow, 10.0)
    assert later.opt_state.adaptive_scale < 1.0
    assert metrics.learning_rate < 1e-2


def test_hyperparameters_anneal_where_asked_for():
    plain = Config(anneal_learning_rate=False)
    options = {
        "anneal_learning_rate": {"learning_rate": 0.1, "critic_learning_rate": 0.3},
        "anneal_clip_eps": {"clip_eps": 0.2, "value_clip_eps": 0.4},
        "anneal_ent_coef": {"ent_coef": 0.02},
    }
    hyper = Hyper(**{k: x for own in options.values() for k, x in own.items()})
    assert annealed(plain, hyper, 0.25) == hyper
    for option, own in options.items():
        config = dataclasses.replace(plain, **{option: True})
        expected = hyper.replace(**{name: value * 0.25 for name, value in own.items()})
        assert annealed(config, hyper, 0.25) == expected
        assert annealed(config, Hyper(), 0.25).value_clip_eps is None


def branches(seed):
    """Numbers for parameters of every label, or their gradients."""
    rng = np.random.default_rng(seed)
    names = ("torso", "policy", "value", "policy_head", "value_head", "log_std")
    return {name: {"kernel": jnp.float32(rng.normal(size=(2, 3)))} for name in names}


def test_actor_and_critic_have_their_own_learning_rates():
    hyper = Hyper(learning_rate=0.01, critic_learning_rate=0.003, max_grad_norm=1.0)
    critic = ("value", "value_head")
    labels = {name: "critic" if name in critic else "actor" for name in branches(0)}
    adams = {"actor": optax.adam(0.5 * 0.01, eps=1e-5), "critic": optax.adam(0.5 * 0.003, eps=1e-5)}
    reference = optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(adams, labels))
    params = expected = branches(0)
    opt_state, reference_state = init_optimizer(hyper, params), reference.init(params)
    half = adapted_rates(hyper, opt_state.replace(adaptive_scale=0.5))
    assert half.learning_rate == pytest.approx(0.5 * 0.01)
    assert adapted_rates(hyper, opt_state) == hyper
    for seed in (1, 2, 3):
        grads = branches(seed)
        params, opt_state, _ = apply_gradients(half, params, opt_state, as_vector(grads))
        updates, reference_state = reference.update(grads, reference_state)
        expected = optax.apply_updates(expected, updates)
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-7)
    tiny = hyper.replace(critic_learning_rate=1e-12)
    still, *_ = apply_gradients(tiny, params, opt_state, as_vector(branches(4)))
    moved = {
        n: float(jnp.max(jnp.abs(still[n]["kernel"] - p["kernel"]))) for n, p in params.items()
    }
    assert all(moved[name] < 1e-9 for name in critic)
    assert all(moved[name] > 1e-4 for name in moved if name not in critic)


@pytest.mark.parametrize("max_grad_norm", [0.1, 1e3])
def test_gradients_are_clipped_by_their_global_norm(max_grad_norm):
    # Adam forgets the size of its first gradient, except next to a large epsilon.
    hyper = Hyper(learning_rate=1.0, max_grad_norm=max_grad_norm, adam_eps=1.0)
    params, grads = branches(0), branches(1)
    grads["policy"] = jax.tree.map(lambda g: 10 * g, grads["policy"])
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    opt_state = init_optimizer(hyper, params)
    stepped, *_, reported = apply_gradients(hyper, params, opt_state, as_vector(grads))
    np.testing.assert_allclose(reported, norm, rtol=1e-6)
    for name, grad in grads.items():
        clipped = grad["kernel"] * min(1.0, max_grad_norm / norm)
        expected = params[name]["kernel"] - clipped / (jnp.abs(clipped) + 1.0)
        np.testing.assert_allclose(stepped[name]["kernel"], expected, rtol=0, atol=2e-5)


def test_an_optimiser_of_ones_own_may_decay_weights(monkeypatch):
    """In place of Adam: it is given the parameters, as optax's decay needs them."""
    monkeypatch.setattr(agent, "_adam", lambda _: optax.add_decayed_weights(0.5))
    hyper, params, grads = Hyper(learning_rate=0.1), branches(0), branches(1)
    stepped, *_ = apply_gradients(hyper, params, init_optimizer(hyper, params), as_vector(grads))
    expected = jax.tree.map(lambda p, g: p - 0.1 * (g + 0.5 * p), params, grads)
    chex.assert_trees_all_close(stepped, expected, rtol=1e-5, atol=1e-7)


def test_minibatches_of_sequences_hold_whole_rollouts(monkeypatch):
    setup, state, hyper = setup_and_state(Clock(3), minibatches="sequences", update_epochs=3)
    order = draw(setup, jax.random.key(0)).order
    assert order.shape == (3, 8)
    state, data = rollout(setup, state, jax.random.key(0))

    def record(setup, state, samples, hyper, learner, picked):
        return learner, (samples.obs[picked[0]], picked[0])

    monkeypatch.setattr(updates, "_update_minibatch", record)
    _, flat = updates.update(setup, state, data, data.transitions.value, hyper, order)
    picked = flat[0].reshape(3 * 2, 4, 8, 2), flat[1].reshape(3 * 2, 4)
    for obs, index in zip(*picked, strict=True):
        wanted = jnp.swapaxes(data.transitions.obs, 0, 1)[index]
        np.testing.assert_array_equal(obs, wanted)
    np.testing.assert_array_equal(np.sort(picked[1].reshape(3, -1)), np.tile(np.arange(8), (3, 1)))


def test_advantages_of_an_epoch_are_by_the_values_it_begins_with(monkeypatch):
    setup, state, hyper = setup_and_state(
        Clock(3), Hyper(gamma=0.9), recompute_advantages=True, update_epochs=3
    )
    order = draw(setup, jax.random.key(0)).order
    state, data = rollout(setup, state, jax.random.key(0))
    steps = data.transitions

    def move(setup, state, samples, hyper, learner, index):
        params = jax.tree.map(lambda x: x + 0.1, learner.params)
        return learner.replace(params=params), (samples.value, samples.advantage, samples.target)

    monkeypatch.setattr(updates, "_update_minibatch", move)
    nothing = jnp.full_like(steps.value, jnp.nan)  # those of the rollout are not asked for
    learner, seen = updates.update(setup, state, data, nothing, hyper, order)
    old, advantage, target = (x.reshape(3, 2, *steps.value.shape) for x in seen)
    np.testing.assert_array_equal(old, jnp.broadcast_to(steps.value, old.shape))
    for epoch in range(3):
        params = jax.tree.map(lambda x, by=0.2 * epoch: x + by, state.params)
        value = apply(setup.agent, params, None, steps.obs, (), steps.first).value
        now = data.replace(transitions=steps.replace(value=value))
        expected = advantages(setup, state.replace(params=params), now, hyper)
        for minibatch in range(2):
            np.testing.assert_allclose(advantage[epoch, minibatch], expected, atol=1e-5)
            np.testing.assert_allclose(target[epoch, minibatch], expected + value, atol=1e-5)
    assert np.ptp(advantage[:, 0], axis=0).min() > 0.01
    for moved in jax.tree.leaves(jax.tree.map(jnp.subtract, learner.params, state.params)):
        np.testing.assert_allclose(moved, 0.6, rtol=1e-6)


def test_a_vector_of_leaves_is_the_same_of_one_run_and_of_several():
    own, shared = jnp.arange(12.0).reshape(2, 2, 3), jnp.array([7.0, 8.0])
    vectors = jax.vmap(as_vector, ({"own": 0, "shared": None},))({"own": own, "shared": shared})
    for run in range(2):
        alone = as_vector({"own": own[run], "shared": shared})
        np.testing.assert_array_equal(alone, [*own[run].ravel(), 7.0, 8.0])
        np.testing.assert_array_equal(vectors[run], alone)
