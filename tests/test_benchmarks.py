"""What decides whether a benchmark's bar is met, and optima with independent values."""

import numpy as np
import pytest

from benchmarks import learning, optima
from benchmarks.targets import SUITES, Target
from purejaxppo import envs


def test_bars():
    returns = np.array([90.0, 100.0])
    assert Target(at_least=95).met(returns, 0, 0)
    assert not Target(at_least=95.1).met(returns, 0, 0)
    assert not Target(at_least=95, every_seed=90).met(returns, 0, 0)
    assert Target(optimum=100).met(returns, 0, 0)
    assert not Target(optimum=101).met(returns, 0, 0)
    assert Target(above_random=True).met(returns, 0, 89.9)
    assert not Target(above_random=True).met(returns, 0, 90.0)


def test_suite_has_every_environment_it_should():
    assert set(SUITES["gymnax"]) == {
        name
        for name in envs.list_environments()
        if not any(part in name for part in ("MinAtar", "MNIST", "test", "/"))
    }


def test_frozen_lake_optimum_without_a_time_limit():
    """0.8235 (14/17) is the known optimum of the 4x4 lake when time is endless."""
    assert optima.frozen_lake(5000) == pytest.approx(14 / 17, abs=1e-3)
    assert optima.frozen_lake(100) == pytest.approx(0.744, abs=1e-3)


def test_bandits_by_simulation():
    rng = np.random.default_rng(0)
    good = rng.integers(0, 2, 20_000)
    arm, wins = np.zeros(20_000, int), 0.0
    for _ in range(100):
        won = rng.random(20_000) < np.where(arm == good, 0.9, 0.1)
        wins += won.mean()
        arm = np.where(won, arm, 1 - arm)
    assert optima.bernoulli_bandit()[0] == pytest.approx(wins, abs=0.3)
    assert optima.bernoulli_bandit(1) == (pytest.approx(0.5), pytest.approx(0.5))


def test_random_policies_are_measured():
    """Catch: the ball is caught by chance, 1 column in 5 for a paddle that wanders."""
    measured = learning.random_returns("Catch-bsuite", {})
    for mean, percentile in (measured["random"], measured["untrained"]):
        assert -1 < mean < percentile < 1
