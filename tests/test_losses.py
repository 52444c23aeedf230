"""GAE and the PPO loss against numbers worked by hand and against plain numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.config import Hyper
from purejaxppo.distributions import Categorical, Gaussian
from purejaxppo.losses import (
    Minibatch,
    gae,
    normalize_advantages,
    ppo_loss,
    sample_weights,
    weighted_mean,
    weighted_var,
)

INF = np.inf


def numpy_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """Each advantage as the sum it stands for, by loops: no recursion shared with the package."""
    T, N = reward.shape
    advantage = np.zeros((T, N))
    for n in range(N):
        for start in range(T):
            weight = 1.0
            for t in range(start, T):
                bootstrap = 0.0 if terminated[t, n] else next_value[t, n]
                delta = reward[t, n] + gamma * bootstrap - value[t, n]
                advantage[start, n] += weight * delta
                if terminated[t, n] or truncated[t, n]:
                    break
                weight *= gamma * gae_lambda
    return advantage


def random_rollout(seed, T=13, N=5):
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, T, N))
    terminated, truncated = rng.random((2, T, N)) < 0.25
    return reward, value, next_value, terminated, truncated


def as_float32(arrays):
    return [jnp.asarray(x, bool if x.dtype == bool else jnp.float32) for x in arrays]


def test_gae_by_hand():
    # With gamma = lambda = 1/2 the trace decays by 1/4 a step. Environment 0, from the end:
    #   t flags       delta                        advantage
    #   6 -           7 + 16/2 - 14   =  1          1
    #   5 both        6        - 12   = -6         -6          (termination wins: no bootstrap)
    #   4 -           5 + 12/2 - 10   =  1          1 - 6/4 = -0.5
    #   3 truncated   4 + 20/2 -  8   =  6          6          (bootstrap, trace stops)
    #   2 -           3 +  8/2 -  6   =  1          1 + 6/4 =  2.5
    #   1 terminated  2        -  4   = -2         -2
    #   0 -           1 +  4/2 -  2   =  1          1 - 2/4 =  0.5
    # Environment 1 earns nothing but a last value of 64: 32, and a quarter of it each step earlier.
    reward = jnp.stack([jnp.arange(1.0, 8.0), jnp.zeros(7)], axis=1)
    value = jnp.stack([2 * jnp.arange(1.0, 8.0), jnp.zeros(7)], axis=1)
    next_value = jnp.array(
        [[4, 0], [100, 0], [8, 0], [20, 0], [12, 0], [200, 0], [16, 64]], jnp.float32
    )
    terminated = jnp.zeros((7, 2), bool).at[jnp.array([1, 5]), 0].set(True)
    truncated = jnp.zeros((7, 2), bool).at[jnp.array([3, 5]), 0].set(True)
    expected = [
        [0.5, 2**-7], [-2, 2**-5], [2.5, 2**-3], [6, 2**-1], [-0.5, 2], [-6, 8], [1, 32],
    ]  # fmt: skip
    actual = gae(reward, value, next_value, terminated, truncated, 0.5, 0.5)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0), (0.0, 0.5)]
)
def test_gae_equals_the_sum_of_deltas(gamma, gae_lambda):
    rollout = random_rollout(seed=3)
    assert {(True, True), (True, False), (False, True), (False, False)} == set(
        zip(rollout[3].ravel().tolist(), rollout[4].ravel().tolist(), strict=True)
    )
    actual = gae(*as_float32(rollout), gamma, gae_lambda)
    np.testing.assert_allclose(actual, numpy_gae(*rollout, gamma, gae_lambda), rtol=0, atol=1e-5)


def test_gae_with_lambda_one_is_the_monte_carlo_return():
    reward, value, next_value, terminated, truncated = random_rollout(seed=4)
    # Without a real V(next) the deltas would not telescope: the next value is the next step's.
    next_value[:-1] = np.where(truncated[:-1], next_value[:-1], value[1:])
    gamma, T, N = 0.9, *reward.shape
    returns = np.zeros((T, N))
    for n in range(N):
        following = next_value[-1, n]
        for t in reversed(range(T)):
            if truncated[t, n]:
                following = next_value[t, n]
            if terminated[t, n]:
                following = 0.0
            following = returns[t, n] = reward[t, n] + gamma * following
    rollout = as_float32([reward, value, next_value, terminated, truncated])
    np.testing.assert_allclose(gae(*rollout, gamma, 1.0) + value, returns, rtol=0, atol=1e-5)


def test_gae_never_reads_the_value_after_a_termination():
    reward, value, next_value, terminated, truncated = as_float32(random_rollout(seed=5))
    poisoned = jnp.where(terminated, jnp.nan, next_value)
    actual = gae(reward, value, poisoned, terminated, truncated, 0.99, 0.95)
    expected = gae(reward, value, next_value, terminated, truncated, 0.99, 0.95)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_gae_names_the_array_of_a_wrong_shape(position):
    name = ["reward", "value", "next_value", "terminated", "truncated"][position]
    arrays = [jnp.zeros((4, 3))] * 3 + [jnp.zeros((4, 3), bool)] * 2
    arrays[position] = arrays[position][..., None]
    with pytest.raises(AssertionError, match=rf"\b{name}\b"):
        gae(*arrays, 0.99, 0.95)


@pytest.mark.parametrize("shape", [(4,), (4, 3, 1)])
def test_gae_names_a_reward_of_a_wrong_rank(shape):
    others = [jnp.zeros((4, 3))] * 2 + [jnp.zeros((4, 3), bool)] * 2
    with pytest.raises(AssertionError, match="reward"):
        gae(jnp.zeros(shape), *others, 0.99, 0.95)


def test_weighted_mean_and_variance():
    x = jnp.array([1.0, jnp.nan, 3.0, jnp.inf, 8.0])
    weight = sample_weights(jnp.array([True, False, True, False, True]))
    np.testing.assert_allclose(weighted_mean(x, weight), 4.0, rtol=1e-6)
    np.testing.assert_allclose(weighted_var(x, weight), (9 + 1 + 16) / 3, rtol=1e-6)
    assert weighted_mean(x, sample_weights(jnp.zeros(5, bool))) == 0.0


def test_normalized_advantages_have_mean_0_and_deviation_1_over_the_valid():
    advantage = np.random.default_rng(0).normal(3.0, 7.0, size=40).astype(np.float32)
    valid = np.arange(40) % 4 != 1
    poisoned = jnp.where(valid, advantage, jnp.nan)
    normalized = np.asarray(normalize_advantages(poisoned, sample_weights(valid)))[valid]
    expected = (advantage[valid] - advantage[valid].mean()) / advantage[valid].std()
    np.testing.assert_allclose(normalized, expected, rtol=0, atol=1e-5)


def numpy_loss(log_prob, entropy, value, batch, coef):
    """The loss of the paper over the valid entries, one sample after another, in float64."""
    policy, value_loss, bonus, kl, clipped = [], [], [], [], []
    for b in np.flatnonzero(batch["valid"]):
        log_ratio = log_prob[b] - batch["log_prob"][b]
        ratio, advantage = np.exp(log_ratio), batch["advantage"][b]
        low, high = 1 - coef["clip_eps"], 1 + coef["clip_eps"]
        policy.append(-min(ratio * advantage, min(max(ratio, low), high) * advantage))
        error = (value[b] - batch["target"][b]) ** 2
        if coef["value_clip_eps"] is not None:
            eps, old = coef["value_clip_eps"], batch["value"][b]
            near = min(max(value[b], old - eps), old + eps)
            error = max(error, (near - batch["target"][b]) ** 2)
        value_loss.append(0.5 * error)
        bonus.append(entropy[b])
        kl.append(ratio - 1 - log_ratio)
        clipped.append(float(not low <= ratio <= high))
    parts = [np.mean(part) for part in (policy, value_loss, bonus, kl, clipped)]
    return parts[0] + coef["vf_coef"] * parts[1] - coef["ent_coef"] * parts[2], parts


def categorical_log_prob_and_entropy(logits, action):
    log_probs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    entropy = -np.sum(np.exp(log_probs) * log_probs, axis=-1)
    return log_probs[np.arange(len(action)), action], entropy


def gaussian_log_prob_and_entropy(mean, log_std, action):
    density = np.exp(-0.5 * ((action - mean) / np.exp(log_std)) ** 2)
    log_prob = np.sum(np.log(density / (np.sqrt(2 * np.pi) * np.exp(log_std))), axis=-1)
    return log_prob, np.sum(0.5 * np.log(2 * np.pi * np.e * np.exp(2 * log_std)), axis=-1)


def central_difference(function, x, step=1e-6):
    """The gradient of function at x (float64), one entry after another."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        shift = np.zeros_like(x)
        shift[index] = step
        gradient[index] = (function(x + shift) - function(x - shift)) / (2 * step)
    return gradient


def random_batch(seed, log_prob, action, size):
    """Both signs of advantage, ratios and value moves on both sides of their clips."""
    rng = np.random.default_rng(seed)
    return {
        "action": action,
        "log_prob": log_prob + rng.uniform(-0.5, 0.5, size),
        "value": rng.normal(size=size),
        "advantage": rng.normal(size=size),
        "target": rng.normal(size=size),
        "valid": np.arange(size) % 4 != 2,
    }


def minibatch(batch):
    size = len(batch["valid"])
    arrays = {
        name: jnp.asarray(x, None if x.dtype.kind in "bi" else jnp.float32)
        for name, x in batch.items()
    }
    arrays["weight"] = sample_weights(arrays.pop("valid"))
    empty = jnp.zeros((size, 0))
    return Minibatch(obs=empty, first=jnp.zeros(size, bool), noise=empty, **arrays)


COEFFICIENTS = [
    {"clip_eps": 0.2, "value_clip_eps": None, "ent_coef": 0.03, "vf_coef": 0.7},
    {"clip_eps": 0.1, "value_clip_eps": 0.3, "ent_coef": 0.0, "vf_coef": 2.0},
]


@pytest.mark.parametrize("coef", COEFFICIENTS)
def test_categorical_loss_and_gradients(coef):
    size = 24
    rng = np.random.default_rng(0)
    logits, value = rng.normal(size=(size, 3)), rng.normal(size=size)
    action = rng.integers(3, size=size)
    batch = random_batch(1, categorical_log_prob_and_entropy(logits, action)[0], action, size)

    def reference(logits, value):
        return numpy_loss(*categorical_log_prob_and_entropy(logits, action), value, batch, coef)

    def loss(logits, value):
        return ppo_loss(Categorical(logits), value, minibatch(batch), Hyper(**coef))

    expected, parts = reference(logits, value)
    (actual, metrics), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        jnp.float32(logits), jnp.float32(value)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert 0 < parts[-1] < 1  # some ratios are clipped, some are not
    np.testing.assert_allclose(jax.tree.leaves(metrics), parts, rtol=2e-5, atol=1e-6)
    for gradient, numeric in (
        (grads[0], central_difference(lambda x: reference(x, value)[0], logits)),
        (grads[1], central_difference(lambda x: reference(logits, x)[0], value)),
    ):
        np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(gradient[~batch["valid"]], 0.0)


@pytest.mark.parametrize("coef", COEFFICIENTS)
def test_gaussian_loss_and_gradients(coef):
    size = 16
    rng = np.random.default_rng(2)
    mean, log_std, action = rng.normal(size=(3, size, 2)) * 0.5
    value = rng.normal(size=size)
    batch = random_batch(3, gaussian_log_prob_and_entropy(mean, log_std, action)[0], action, size)

    def reference(mean, log_std):
        both = gaussian_log_prob_and_entropy(mean, log_std, action)
        return numpy_loss(*both, value, batch, coef)[0]

    def loss(mean, log_std):
        policy = Gaussian(mean, log_std, jnp.full(2, -INF), jnp.full(2, INF))
        return ppo_loss(policy, jnp.float32(value), minibatch(batch), Hyper(**coef))[0]

    actual, grads = jax.value_and_grad(loss, (0, 1))(jnp.float32(mean), jnp.float32(log_std))
    np.testing.assert_allclose(actual, reference(mean, log_std), rtol=1e-5)
    numeric = (
        central_difference(lambda x: reference(x, log_std), mean),
        central_difference(lambda x: reference(mean, x), log_std),
    )
    for gradient, expected in zip(grads, numeric, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=2e-6)


POISON = [
    ("advantage", np.nan), ("advantage", INF), ("log_prob", np.nan), ("log_prob", -INF),
    ("target", np.nan), ("value", np.nan),
]  # fmt: skip


@pytest.mark.parametrize(("field", "poison"), POISON)
def test_what_an_invalid_entry_holds_does_not_matter(field, poison):
    size = 8
    rng = np.random.default_rng(4)
    logits, value = rng.normal(size=(size, 3)), rng.normal(size=size)
    action = rng.integers(3, size=size)
    clean = random_batch(5, categorical_log_prob_and_entropy(logits, action)[0], action, size)
    poisoned = clean | {field: np.where(clean["valid"], clean[field], poison)}

    def loss(logits, value, batch):
        return ppo_loss(Categorical(logits), value, minibatch(batch), Hyper(**COEFFICIENTS[1]))

    grad = jax.value_and_grad(loss, (0, 1), has_aux=True)
    inputs = jnp.float32(logits), jnp.float32(value)
    chex.assert_trees_all_close(grad(*inputs, poisoned), grad(*inputs, clean), rtol=1e-6)


def test_a_batch_without_valid_entries_gives_no_gradient():
    batch = random_batch(6, np.zeros(4), np.zeros(4, int), 4)
    batch["valid"][:] = False

    def loss(logits, value):
        coef = Hyper(**COEFFICIENTS[1])
        return ppo_loss(Categorical(logits), value, minibatch(batch), coef)[0]

    grads = jax.grad(loss, (0, 1))(jnp.ones((4, 3)), jnp.ones(4))
    chex.assert_trees_all_equal(grads, (jnp.zeros((4, 3)), jnp.zeros(4)))


@pytest.mark.parametrize("name", ["log_prob", "value", "advantage", "target", "weight"])
def test_ppo_loss_names_the_field_of_a_wrong_shape(name):
    batch = minibatch(random_batch(7, np.zeros(4), np.zeros(4, int), 4))
    batch = batch.replace(**{name: getattr(batch, name)[:, None]})
    with pytest.raises(AssertionError, match=rf"\b{name}\b"):
        ppo_loss(Categorical(jnp.zeros((4, 3))), jnp.zeros(4), batch, Hyper(**COEFFICIENTS[0]))


def test_ppo_loss_names_a_log_prob_of_a_wrong_shape():
    batch = minibatch(random_batch(8, np.zeros(4), np.zeros(4, int), 4))
    policy = Categorical(jnp.zeros((4, 1, 3)))
    with pytest.raises(AssertionError, match="log_prob"):
        ppo_loss(policy, jnp.zeros(4), batch, Hyper(**COEFFICIENTS[0]))
