"""Distributions against scipy, quadrature and frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

from purejaxppo.distributions import (
    Categorical,
    Gaussian,
    MultiCategorical,
    TanhGaussian,
    draw_noise,
)
from purejaxppo.spaces import Box, Discrete, MultiDiscrete

LOGITS = np.array([0.5, -1.0, 2.0, 0.0])
NVEC = (2, 3)
MULTI_LOGITS = np.array([0.3, -0.4, 1.0, 0.0, -1.0])
# A dimension each: asymmetric around a centre, all negative, wide.
LOW, HIGH = np.array([-0.5, -3.0, -10.0]), np.array([2.0, -1.0, 10.0])
MEAN, LOG_STD = np.array([0.4, -0.7, 0.1]), np.array([-0.5, 0.3, 0.0])


def tanh_gaussian(mean=MEAN, log_std=LOG_STD, low=LOW, high=HIGH):
    return TanhGaussian(*(jnp.asarray(x, jnp.float32) for x in (mean, log_std, low, high)))


def gaussian(mean=MEAN, log_std=LOG_STD, low=LOW, high=HIGH):
    return Gaussian(*(jnp.asarray(x, jnp.float32) for x in (mean, log_std, low, high)))


def test_categorical_log_prob_entropy_and_mode():
    policy = Categorical(jnp.tile(jnp.float32(LOGITS), (4, 1)))
    probabilities = scipy.special.softmax(LOGITS)
    np.testing.assert_allclose(
        policy.log_prob(jnp.arange(4)), np.log(probabilities), rtol=1e-5, atol=0
    )
    expected = scipy.stats.entropy(probabilities)
    np.testing.assert_allclose(policy.entropy(jnp.zeros(())), [expected] * 4, rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(), [2, 2, 2, 2])


@pytest.mark.parametrize("size", [1, 2, 6, 7])
def test_categorical_of_any_size_is_its_softmax(size):
    logits = np.random.default_rng(0).normal(size=(5, 3, size)).astype(np.float32)
    sample, policy = np.argmax(logits, axis=-1), Categorical(jnp.asarray(logits))
    mode = jax.jit(Categorical.mode)(policy)
    np.testing.assert_array_equal(mode, sample)
    assert mode.dtype == np.int32

    def ours(policy):
        return (policy.log_prob(sample) + policy.entropy(0)).sum()

    total, gradient = jax.jit(jax.value_and_grad(ours))(policy)
    p = scipy.special.softmax(logits.astype(np.float64), axis=-1)
    entropy = -np.sum(p * np.log(p), axis=-1, keepdims=True)
    np.testing.assert_allclose(total, np.log(p.max(-1)).sum() + entropy.sum(), rtol=1e-5, atol=1e-6)
    expected = (np.arange(size) == sample[..., None]) - p - p * (np.log(p) + entropy)
    np.testing.assert_allclose(gradient.logits, expected, atol=1e-6)


def test_categorical_takes_the_first_of_equals():
    assert Categorical(jnp.array([0.0, 2.0, 1.0, 2.0])).mode() == 1


def test_categorical_survives_extreme_logits():
    policy = Categorical(jnp.array([1e4, -1e4, 0.0]))
    assert policy.log_prob(jnp.array(0)) == 0.0
    assert policy.log_prob(jnp.array(1)) == -2e4
    assert policy.entropy(jnp.zeros(())) == 0.0
    gradient = jax.grad(lambda x: Categorical(x).entropy(jnp.zeros(())))(policy.logits)
    assert np.all(np.isfinite(gradient))


def test_categorical_samples_have_the_probabilities():
    size = 20_000
    noise = draw_noise(jax.random.key(1), Discrete(4), (size,))
    samples = Categorical(jnp.float32(LOGITS)).sample(noise)
    assert samples.shape == (size,)
    counts = np.bincount(samples, minlength=4)
    assert scipy.stats.chisquare(counts, size * scipy.special.softmax(LOGITS)).pvalue > 1e-3


def test_categorical_gives_the_environment_its_sample():
    actions = jnp.array([3, 1])
    np.testing.assert_array_equal(Categorical(jnp.zeros((2, 4))).to_env(actions), actions)


def test_multi_categorical_is_the_product_of_its_choices():
    first, second = np.split(MULTI_LOGITS, [2])
    policy = MultiCategorical(jnp.float32(MULTI_LOGITS), NVEC)
    for i, p in enumerate(scipy.special.softmax(first)):
        for j, q in enumerate(scipy.special.softmax(second)):
            actual = policy.log_prob(jnp.array([i, j]))
            np.testing.assert_allclose(actual, np.log(p * q), rtol=1e-5)
    joint = np.outer(scipy.special.softmax(first), scipy.special.softmax(second))
    np.testing.assert_allclose(
        policy.entropy(jnp.zeros(())), scipy.stats.entropy(joint.ravel()), rtol=1e-5
    )
    np.testing.assert_array_equal(policy.mode(), [0, 0])


def test_multi_categorical_samples_are_independent_choices():
    size = 20_000
    noise = draw_noise(jax.random.key(2), MultiDiscrete(NVEC), (size,))
    policy = MultiCategorical(jnp.tile(jnp.float32(MULTI_LOGITS), (size, 1)), NVEC)
    samples = np.asarray(policy.sample(noise))
    assert samples.shape == (size, 2)
    joint = np.outer(*map(scipy.special.softmax, np.split(MULTI_LOGITS, [2])))
    counts = np.bincount(samples[:, 0] * 3 + samples[:, 1], minlength=6)
    assert scipy.stats.chisquare(counts, size * joint.ravel()).pvalue > 1e-3
    assert policy.log_prob(jnp.asarray(samples)).shape == (size,)
    assert policy.entropy(noise).shape == (size,)


def test_gaussian_log_prob_and_entropy():
    samples = np.random.default_rng(0).normal(0, 2, size=(6, 3))
    reference = scipy.stats.norm(MEAN, np.exp(LOG_STD))
    policy = gaussian(np.tile(MEAN, (6, 1)), np.tile(LOG_STD, (6, 1)))
    np.testing.assert_allclose(
        policy.log_prob(jnp.float32(samples)), reference.logpdf(samples).sum(-1), rtol=1e-5
    )
    np.testing.assert_allclose(
        policy.entropy(jnp.zeros((6, 3))), [reference.entropy().sum()] * 6, rtol=1e-5
    )


def test_gaussian_samples_have_the_moments_and_are_not_clipped():
    size = 20_000
    noise = draw_noise(jax.random.key(3), Box(-1.0, 1.0, (3,)), (size,))
    samples = np.asarray(gaussian().sample(noise))
    for i in range(3):
        standard = (samples[:, i] - MEAN[i]) / np.exp(LOG_STD[i])
        test = scipy.stats.kstest(standard, "norm")
        assert test.pvalue > 1e-3
    assert np.any(samples > HIGH)
    np.testing.assert_allclose(np.corrcoef(samples.T), np.eye(3), atol=0.03)


def test_gaussian_is_clipped_for_the_environment_only():
    policy = gaussian(
        np.zeros(4), np.zeros(4), [-0.5, -np.inf, -np.inf, 1.0], [2.0, np.inf, 0.0, np.inf]
    )
    far = jnp.array([[-9.0, -9.0, -9.0, -9.0], [9.0, 9.0, 9.0, 9.0]])
    np.testing.assert_array_equal(policy.to_env(far), [[-0.5, -9, -9, 1], [2, 9, 0, 9]])
    expected = scipy.stats.norm.logpdf(np.asarray(far)).sum(-1)
    np.testing.assert_allclose(policy.log_prob(far), expected, rtol=1e-6)
    np.testing.assert_array_equal(policy.mode(), np.zeros(4))


def squashed_density(action, mean, log_std, low, high):
    """Density of low + (tanh(x) + 1)(high - low)/2, from the derivative of its inverse."""
    unit = 2 * (action - low) / (high - low) - 1
    slope = 2 / ((high - low) * (1 - unit**2))
    return scipy.stats.norm.pdf(np.arctanh(unit), mean, np.exp(log_std)) * slope


@pytest.mark.parametrize("i", [0, 1, 2])
def test_tanh_gaussian_log_prob_is_the_density_of_the_squashed_action(i):
    policy = tanh_gaussian(MEAN[i : i + 1], LOG_STD[i : i + 1], LOW[i : i + 1], HIGH[i : i + 1])
    samples = np.linspace(-3, 3, 25)[:, None]
    actions = np.asarray(policy.to_env(jnp.float32(samples)))
    expected = LOW[i] + (np.tanh(samples) + 1) * (HIGH[i] - LOW[i]) / 2
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-6)
    density = squashed_density(expected[:, 0], MEAN[i], LOG_STD[i], LOW[i], HIGH[i])
    np.testing.assert_allclose(policy.log_prob(jnp.float32(samples)), np.log(density), rtol=1e-4)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_tanh_gaussian_density_integrates_to_one_over_the_bounds(i):
    policy = tanh_gaussian(MEAN[i : i + 1], LOG_STD[i : i + 1], LOW[i : i + 1], HIGH[i : i + 1])
    # Points evenly spread before tanh lie dense near the bounds, where the density is steep.
    samples = np.linspace(-9, 9, 40_001)
    density = np.exp(np.asarray(policy.log_prob(jnp.float32(samples)[:, None]), np.float64))
    actions = LOW[i] + (np.tanh(samples) + 1) * (HIGH[i] - LOW[i]) / 2
    assert scipy.integrate.trapezoid(density, actions) == pytest.approx(1, abs=1e-4)


def test_tanh_gaussian_dimensions_are_independent():
    samples = jnp.float32(np.random.default_rng(1).normal(size=(5, 3)))
    separate = sum(
        tanh_gaussian(*(x[i : i + 1] for x in (MEAN, LOG_STD, LOW, HIGH))).log_prob(
            samples[:, i : i + 1]
        )
        for i in range(3)
    )
    np.testing.assert_allclose(tanh_gaussian().log_prob(samples), separate, rtol=1e-5)


def test_tanh_gaussian_entropy_estimate_has_the_right_mean():
    expected = 0.0
    for mean, log_std, low, high in zip(MEAN, LOG_STD, LOW, HIGH, strict=True):
        samples = np.linspace(mean - 9 * np.exp(log_std), mean + 9 * np.exp(log_std), 20_001)
        slope = (high - low) / 2 / np.cosh(samples) ** 2
        density = scipy.stats.norm.pdf(samples, mean, np.exp(log_std))
        expected -= scipy.integrate.trapezoid(density * np.log(density / slope), samples)
    size = 50_000
    noise = draw_noise(jax.random.key(4), Box(-1.0, 1.0, (3,)), (size,))
    policy = tanh_gaussian()
    estimates = np.asarray(policy.entropy(noise), np.float64)
    error = estimates.std() / np.sqrt(size)
    assert 0 < error < 0.01
    assert estimates.mean() == pytest.approx(expected, abs=4 * error)
    # It is the estimate from the very sample that the noise draws, so its gradient is one too.
    surprise = -policy.log_prob(policy.sample(noise))
    assert np.mean(surprise) == pytest.approx(expected, abs=0.03)


def test_tanh_gaussian_samples_stay_within_bounds_and_have_the_moments():
    size = 20_000
    noise = draw_noise(jax.random.key(5), Box(-1.0, 1.0, (3,)), (size,))
    policy = tanh_gaussian(log_std=[-0.5, 0.3, 2.0])
    actions = np.asarray(policy.to_env(policy.sample(noise)), np.float64)
    assert np.all(actions >= LOW)
    assert np.all(actions <= HIGH)
    for i, std in enumerate(np.exp([-0.5, 0.3, 2.0])):
        samples = np.linspace(MEAN[i] - 9 * std, MEAN[i] + 9 * std, 20_001)
        squashed = LOW[i] + (np.tanh(samples) + 1) * (HIGH[i] - LOW[i]) / 2
        density = scipy.stats.norm.pdf(samples, MEAN[i], std)
        mean = scipy.integrate.trapezoid(squashed * density, samples)
        var = scipy.integrate.trapezoid((squashed - mean) ** 2 * density, samples)
        assert actions[:, i].mean() == pytest.approx(mean, abs=4 * np.sqrt(var / size))
        assert actions[:, i].var() == pytest.approx(var, rel=0.05)


def test_tanh_gaussian_where_there_is_no_choice():
    """A bound twice is an action all the same, and the other dimensions' densities as ever."""
    policy = tanh_gaussian(low=[-0.5, 1.0, -10.0], high=[2.0, 1.0, 10.0])
    samples = jnp.array([[0.1, 0.2, 0.3]])
    np.testing.assert_array_equal(policy.to_env(samples)[:, 1], [1.0])
    wide = tanh_gaussian(low=[-0.5, -1.0, -10.0], high=[2.0, 1.0, 10.0])
    np.testing.assert_allclose(policy.log_prob(samples), wide.log_prob(samples), rtol=1e-6)
    np.testing.assert_allclose(policy.entropy(samples), wide.entropy(samples), rtol=1e-6)


def test_tanh_gaussian_stays_within_bounds_that_float32_rounds():
    low, high = np.float32([-2.0, -2.0, -10.0]), np.float32([0.7, -0.8, 10.0])
    unclipped = low + 2 * (high - low) / 2
    assert (unclipped > high).any()
    np.testing.assert_array_equal(
        tanh_gaussian(low=low, high=high).to_env(jnp.full((1, 3), 30.0)), [high]
    )


@pytest.mark.parametrize("magnitude", [-30.0, 30.0])
def test_tanh_gaussian_is_stable_for_large_samples(magnitude):
    samples = jnp.full((1, 3), magnitude)

    def log_prob(mean, log_std, sample):
        return jnp.sum(tanh_gaussian(mean, log_std).log_prob(sample))

    value, grads = jax.value_and_grad(log_prob, (0, 1, 2))(
        jnp.float32(MEAN), jnp.float32(LOG_STD), samples
    )
    # log(1 - tanh(x)^2) -> log 4 - 2|x|, far beyond what float32's tanh can tell from 1.
    slope = np.sum(np.log((HIGH - LOW) / 2) + np.log(4) - 60)
    expected = scipy.stats.norm.logpdf(magnitude, MEAN, np.exp(LOG_STD)).sum() - slope
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert all(np.all(np.isfinite(gradient)) for gradient in grads)
    noise = (samples - MEAN) / np.exp(LOG_STD)
    entropy, gradient = jax.value_and_grad(
        lambda mean: jnp.sum(tanh_gaussian(mean).entropy(noise))
    )(jnp.float32(MEAN))
    assert np.isfinite(entropy)
    np.testing.assert_allclose(gradient, -2 * np.sign(magnitude) * np.ones(3), rtol=1e-5)


def test_tanh_gaussian_mode_is_the_image_of_the_mean():
    policy = tanh_gaussian()
    expected = LOW + (np.tanh(MEAN) + 1) * (HIGH - LOW) / 2
    np.testing.assert_allclose(policy.to_env(policy.mode()), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (Discrete(4), (5, 2, 4)),
        (MultiDiscrete((2, 3)), (5, 2, 5)),
        (Box(-1.0, 1.0, (2, 3)), (5, 2, 6)),
    ],
)
def test_noise_has_what_a_sample_needs(space, shape):
    assert draw_noise(jax.random.key(0), space, (5, 2)).shape == shape
