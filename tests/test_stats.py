"""Running statistics against numpy over everything seen."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.stats import (
    Moments,
    ReturnStats,
    init_moments,
    init_return_stats,
    normalize,
    return_scale,
    update_moments,
    update_return_stats,
)

update = jax.jit(update_moments)


def test_moments_start_at_mean_0_and_variance_1():
    moments = init_moments((2, 3))
    np.testing.assert_array_equal(moments.mean, np.zeros((2, 3)))
    np.testing.assert_array_equal(moments.var, np.ones((2, 3)))
    assert moments.count == 0


@pytest.mark.parametrize(
    ("loc", "scale", "tolerance"),
    [(0.0, 1.0, 1e-5), (-3.0, 0.01, 1e-4), (1e4, 1.0, 1e-3), (0.0, 1e4, 1e-5)],
)
def test_merged_moments_are_those_of_everything_seen(loc, scale, tolerance):
    rng = np.random.default_rng(0)
    moments, seen = init_moments((3,)), []
    for i in range(5):
        # Later batches drift, as observations do while a policy learns.
        samples = rng.normal(loc + i * scale, scale * (1 + i), (16, 4, 3)).astype(np.float32)
        valid = rng.random((16, 4)) < 0.7
        seen.append(samples[valid].astype(np.float64))
        moments = update(moments, jnp.where(valid[..., None], samples, jnp.nan), valid)
        every = np.concatenate(seen)
        assert moments.count == len(every)
        np.testing.assert_allclose(moments.mean, every.mean(0), rtol=1e-6, atol=tolerance * scale)
        np.testing.assert_allclose(moments.var, every.var(0), rtol=tolerance)


def test_moments_of_a_scalar():
    samples = jnp.arange(8.0).reshape(4, 2)
    moments = update(init_moments(()), samples, jnp.ones((4, 2), bool))
    assert (moments.count, moments.mean, moments.var) == (8, 3.5, 5.25)


def test_an_empty_batch_changes_nothing():
    samples = jnp.full((16, 4, 3), jnp.nan)
    nothing = jnp.zeros((16, 4), bool)
    untouched = init_moments((3,))
    chex.assert_trees_all_equal(update(untouched, samples, nothing), untouched)
    some = Moments(
        jnp.array(7.0), jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 5.0, 6.0]), jnp.array(0.0)
    )
    chex.assert_trees_all_equal(update(some, samples, nothing), some)


def test_moments_of_a_billion_samples_with_a_large_mean():
    batch = np.random.default_rng(2).normal(1e4, 1.0, (1000, 100, 1)).astype(np.float32)
    merge = jax.jit(
        lambda m, x: jax.lax.fori_loop(
            0, 10_000, lambda _, m: update_moments(m, x, jnp.ones((1000, 100), bool)), m
        ),
        compiler_options={"xla_backend_optimization_level": 3},
    )
    moments = merge(init_moments((1,)), batch)
    assert moments.count == 1e9
    np.testing.assert_allclose(moments.mean, batch.mean((0, 1), np.float64), atol=2e-3)
    np.testing.assert_allclose(moments.var, batch.var((0, 1), np.float64), rtol=1e-3)


@pytest.mark.parametrize("start", [2.0**24, 2.0**31])
def test_a_large_count_goes_on(start):
    """One sample a batch, where float32 alone would have stood still."""
    moments = init_moments(()).replace(count=jnp.float32(start))
    moments = jax.lax.fori_loop(
        0, 1000, lambda _, m: update_moments(m, jnp.ones((1, 1)), jnp.ones((1, 1), bool)), moments
    )
    assert float(moments.count) + float(moments.lost) == start + 1000


def test_normalize_centres_scales_and_clips():
    moments = Moments(
        jnp.array(9.0), jnp.array([1.0, -2.0]), jnp.array([4.0, 0.25]), jnp.array(0.0)
    )
    samples = jnp.array([[[5.0, -2.5], [1.0, 1e6], [-1e6, -2.0]]])
    expected = [[[2.0, -1.0], [0.0, 10.0], [-10.0, 0.0]]]
    np.testing.assert_allclose(normalize(moments, samples), expected, rtol=1e-6)


def test_normalize_is_finite_for_a_constant():
    moments = update(init_moments((1,)), jnp.full((4, 2, 1), 5.0), jnp.ones((4, 2), bool))
    np.testing.assert_array_equal(normalize(moments, jnp.full((1, 1), 5.0)), [[0.0]])


def test_normalize_before_anything_is_seen_keeps_the_observation():
    samples = jnp.array([[0.5, -3.0]])
    np.testing.assert_allclose(normalize(init_moments((2,)), samples), samples, rtol=1e-6)


def numpy_return_stats(trace, reward, ended, valid, gamma):
    """(returns that count, trace afterwards), one environment and step after another."""
    trace, returns = np.array(trace, np.float64), []
    for t in range(len(reward)):
        for n in range(len(trace)):
            if valid[t, n]:
                trace[n] = gamma * trace[n] + reward[t, n]
                returns.append(trace[n])
            if ended[t, n]:
                trace[n] = 0.0
    return returns, trace


def test_return_trace_restarts_at_episode_ends_and_leaves_out_invalid_steps():
    rng = np.random.default_rng(1)
    stats, trace, returns = init_return_stats(4), np.zeros(4), []
    for _ in range(3):  # the trace goes on from rollout to rollout
        reward = rng.normal(1.0, 2.0, (12, 4)).astype(np.float32)
        ended, valid = rng.random((12, 4)) < 0.2, rng.random((12, 4)) < 0.8
        more, trace = numpy_return_stats(trace, reward, ended, valid, 0.9)
        returns += more
        poisoned = jnp.where(valid, reward, jnp.nan)
        stats = jax.jit(update_return_stats)(stats, poisoned, ended, valid, 0.9)
        np.testing.assert_allclose(stats.trace, trace, rtol=1e-5, atol=1e-6)
    assert stats.moments.count == len(returns)
    np.testing.assert_allclose(stats.moments.mean, np.mean(returns), rtol=1e-5)
    np.testing.assert_allclose(stats.moments.var, np.var(returns), rtol=1e-5)


def test_return_trace_by_hand():
    # Rewards of 1 with gamma 1/2: 1, 1.5, 1.75; the episode ends there and 1 follows.
    ended = jnp.array([False, False, True, False])[:, None]
    stats = update_return_stats(
        init_return_stats(1), jnp.ones((4, 1)), ended, jnp.ones((4, 1), bool), 0.5
    )
    np.testing.assert_array_equal(stats.trace, [1.0])
    np.testing.assert_allclose(stats.moments.mean, (1 + 1.5 + 1.75 + 1) / 4)


def test_return_scale_is_the_deviation_of_the_return():
    assert return_scale(None) == 1.0
    np.testing.assert_allclose(return_scale(init_return_stats(3)), 1.0, rtol=1e-6)
    # Nothing has been earned so far: what comes first is not multiplied by 10,000.
    nothing = update_return_stats(
        init_return_stats(1),
        jnp.zeros((4, 1)),
        jnp.zeros((4, 1), bool),
        jnp.ones((4, 1), bool),
        0.5,
    )
    assert return_scale(nothing) == 1.0
    # Nor is what is always the same multiplied by what float32 makes of its sums.
    always = jnp.ones((64, 16), bool)
    for reward in (0.1, -0.7, 1e3):
        constant = init_return_stats(16)
        for _ in range(3):
            constant = update_return_stats(constant, reward * always, always, always, 0.99)
        assert return_scale(constant) == 1.0
    moments = Moments(jnp.array(5.0), jnp.array(100.0), jnp.array(9.0), jnp.array(0.0))
    np.testing.assert_allclose(return_scale(ReturnStats(moments, jnp.zeros(3))), 3.0, rtol=1e-6)
