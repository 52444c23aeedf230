"""Shuffles hold every sample once, and nothing that a sorted random order would not show."""

import jax
import numpy as np
import pytest
import scipy.stats

from purejaxppo import shuffles


def permutations(seed, epochs, size):
    return shuffles.permutations(
        jax.random.bits(jax.random.key(seed), (epochs, shuffles.BITS)), size
    )


@pytest.mark.parametrize("size", [1, 2, 64, 100, 1025])
def test_orders_are_permutations(size):
    order = np.asarray(permutations(0, 5, size))
    assert order.dtype == np.uint32
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(size), (5, 1)))
    if size >= 64:
        assert len(np.unique(order, axis=0)) == 5
        again = permutations(1, 5, size)
        assert np.mean(order == again) < 0.1
        np.testing.assert_array_equal(order, permutations(0, 5, size))


@pytest.mark.parametrize("size", [8, 11])
def test_orders_put_every_sample_anywhere(size):
    epochs = 4000
    order = np.asarray(permutations(2, epochs, size))
    counts = np.stack([np.bincount(order[:, i], minlength=size) for i in range(size)])
    statistic = np.sum((counts - epochs / size) ** 2) / (epochs / size)
    assert scipy.stats.chi2.sf(statistic, (size - 1) ** 2) > 1e-3
    # Neighbours in the rollout are not neighbours in the shuffled order more than by chance.
    pairs = np.mean(np.diff(order, axis=1) == 1)
    assert pairs == pytest.approx(1 / size, rel=0.1)


@pytest.mark.parametrize("size", [4, 7, 16])
def test_every_order_of_two_samples_is_as_likely(size):
    epochs = 100_000
    order = np.asarray(permutations(3, epochs, size))
    for first, second in ((0, 1), (0, size // 2), (size - 2, size - 1)):
        pairs = np.bincount(order[:, first] * size + order[:, second], minlength=size**2)
        expected = epochs / (size * (size - 1))
        observed = pairs.reshape(size, size)[~np.eye(size, dtype=bool)]
        statistic = np.sum((observed - expected) ** 2) / expected
        assert scipy.stats.chi2.sf(statistic, observed.size - 1) > 1e-4


@pytest.mark.parametrize("size", [512, 1000])
def test_minibatches_mix_steps_and_environments(size):
    """How many of a set of samples come into the first minibatch: hypergeometric, whatever the set."""
    epochs, minibatch, num_envs = 4000, size // 4, 8
    samples = np.asarray(permutations(4, epochs, size))[:, :minibatch]
    steps, environments = np.divmod(samples, num_envs)
    sets = {
        "an environment": environments == 3,
        "a stretch of time": steps < size // num_envs // 4,
        "every other step": steps % 2 == 0,
        "even samples": samples % 2 == 0,
    }
    for name, chosen in sets.items():
        members = np.mean(chosen) * size
        share = minibatch / size
        variance = members * share * (1 - share) * (size - members) / (size - 1)
        counts = np.sum(chosen, axis=1)
        assert np.var(counts) == pytest.approx(variance, rel=0.1), name
        error = np.mean(counts) - round(members) * share
        assert abs(error) < 4 * np.sqrt(variance / epochs), name
