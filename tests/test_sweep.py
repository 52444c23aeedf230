"""Sweeps: which runs there are, and the statistics over what they reach."""

import dataclasses
import random

import numpy as np
import pytest
from scipy import stats as scipy_stats

from purejaxppo.config import Config, Hyper, RunOptions, Settings
from purejaxppo.sweep import (
    Outcome,
    area_under_curve,
    bootstrap_interval,
    describe,
    iqm,
    make_runs,
    make_settings_of,
    programs,
    show,
)
from purejaxppo.values import ConfigError


def sweep(*items, config=None, **run):
    return make_settings_of(Settings(RunOptions(sweep=items, **run), config or Config()))


def test_a_grid_has_every_combination():
    settings = sweep("learning_rate=1e-4,3e-4,1e-3", "ent-coef=0,0.01")
    pairs = [(s.hyper.learning_rate, s.hyper.ent_coef) for s in settings]
    assert pairs == [(rate, ent) for rate in (1e-4, 3e-4, 1e-3) for ent in (0.0, 0.01)]
    assert describe(settings[3].swept) == "learning_rate=0.0003, ent_coef=0.01"
    without = {"torso_layers": (), "policy_layers": (), "cnn_layers": ()}
    expected = "torso_layers=no layers, policy_layers=none, cnn_layers=flat"
    assert describe(without) == expected
    layers = [setting.config.policy_layers for setting in sweep("policy_layers=none,32x16")]
    assert layers == [(), (32, 16)]
    assert {s.config for s in settings} == {Config()}


def test_without_a_sweep_there_is_one_setting():
    (setting,) = sweep()
    assert (setting.swept, setting.config, setting.hyper) == ({}, Config(), Hyper())


@pytest.mark.parametrize("name", Hyper.__dataclass_fields__)
def test_every_hyperparameter_may_differ_between_the_runs_of_a_program(name):
    config = Config(anneal_learning_rate=name != "desired_kl")
    runs = make_runs(sweep(f"{name}=0.25,0.5", config=config), RunOptions(num_seeds=2))
    assert [getattr(run.setting.hyper, name) for run in runs] == [0.25, 0.25, 0.5, 0.5]
    assert len(programs(runs)) == 1


@pytest.mark.parametrize(
    ("item", "name", "values"),
    [
        ("num_envs=4,1e1", "num_envs", [4, 10]),
        ("torso_layers=64x64,,8", "torso_layers", [(64, 64), (), (8,)]),
        ("activation=tanh,relu", "activation", ["tanh", "relu"]),
        ("shared_torso=true,false", "shared_torso", [True, False]),
        ("normalize_advantages=off,batch", "normalize_advantages", ["off", "batch"]),
    ],
)
def test_static_options_are_one_program_each(item, name, values):
    settings = sweep(item)
    assert [getattr(setting.config, name) for setting in settings] == values
    groups = programs(make_runs(settings, RunOptions(num_seeds=3)))
    assert [len(group) for group in groups] == [3] * len(values)


def test_leaving_a_hyperparameter_out_is_another_program():
    runs = make_runs(sweep("target_kl=none,0.01,0.02"), RunOptions())
    assert [[r.setting.hyper.target_kl for r in g] for g in programs(runs)] == [
        [None],
        [0.01, 0.02],
    ]


def test_runs_are_numbered_setting_by_setting_whatever_the_program():
    runs = make_runs(sweep("gamma=0.9,0.99", "num_envs=4,8"), RunOptions(seed=5, num_seeds=2))
    assert [(r.number, r.seed) for r in runs] == list(enumerate([5, 6] * 4))
    assert [[r.number for r in group] for group in programs(runs)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_random_search_draws_from_its_ranges():
    items = ("learning_rate~loguniform(1e-5,1e-2)", "gamma~uniform(0.9,1)")
    settings = sweep(*items, samples=2000)
    rates = np.array([s.hyper.learning_rate for s in settings])
    gammas = np.array([s.hyper.gamma for s in settings])
    places = (np.log10(rates) + 5) / 3, (gammas - 0.9) * 10
    for place in places:
        assert scipy_stats.kstest(place, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(*places)[0, 1]) < 0.1
    assert sweep(*items, samples=3) == settings[:3]
    assert sweep(*items, samples=3, seed=1) != settings[:3]


def test_every_sample_meets_the_whole_grid():
    settings = sweep("learning_rate~uniform(0,1)", "ent_coef=0,0.1", samples=3)
    rates = [s.hyper.learning_rate for s in settings]
    assert rates[::2] == rates[1::2]
    assert len(set(rates)) == 3
    assert [s.hyper.ent_coef for s in settings] == [0.0, 0.1] * 3


@pytest.mark.parametrize(
    ("items", "run", "message"),
    [
        (["lerning_rate=1"], {}, "no such option; did you mean learning_rate"),
        (["gamma"], {}, "write name=value,value or name~"),
        (["gamma=0.9", "gamma=0.8"], {}, "given twice"),
        (["gamma=0.9,0.9"], {}, "there twice"),
        (["gamma=0.9,abc"], {}, "'abc' is not a number"),
        (["gamma=0.9,1.5"], {}, "--gamma 1.5: must be in 0 ... 1"),
        (["cnn_layers=8x3x1,4x2x2"], {}, "must be of nature, nips, minatar, flat, none"),
        (["num_minibatches=3"], {}, "not divisible by --num-minibatches 3"),
        (["env=CartPole-v1"], {}, "cannot be ranked"),
        (["seed=1,2"], {}, "--num-seeds"),
        (["eval_episodes=1,2"], {}, "the same for every run"),
        (["gamma~logunifrom(0.1,1)"], {"samples": 2}, "did you mean loguniform"),
        (["gamma~uniform(1,0.1)"], {"samples": 2}, "low must be below high"),
        (["gamma~loguniform(0,1)"], {"samples": 2}, "above 0"),
        (["gamma~uniform(0,1"], {"samples": 2}, r"write gamma~uniform\(low,high\)"),
        (["gamma~uniform(0,1)"], {}, "with --samples"),
        (["gamma=0.9"], {"samples": 2}, "nothing in --sweep is drawn"),
        (["num_envs~uniform(1,9)"], {"samples": 2}, "compiles anew for every value"),
    ],
)
def test_mistakes(items, run, message):
    with pytest.raises(ConfigError, match=message):
        sweep(*items, **run)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
def test_iqm_is_rliables(size):
    """Rliable calls scipy's trimmed mean of all scores, a quarter cut at each end."""
    values = np.random.default_rng(0).normal(size=(5, size))
    np.testing.assert_allclose(iqm(values), scipy_stats.trim_mean(values, 0.25, axis=-1))
    np.testing.assert_allclose(iqm(values.T, axis=0), iqm(values))


def test_a_run_without_a_return_is_not_the_best_one():
    assert np.isnan(iqm(np.array([1.0, 2.0, 3.0, np.nan])))
    np.testing.assert_array_equal(iqm(np.array([[1.0, 3.0], [1.0, np.nan]])), [2.0, np.nan])


def test_one_failed_run_of_four_does_not_decide_the_iqm():
    assert iqm(np.array([1.0, 2.0, 3.0, -np.inf])) == 1.5
    assert iqm(np.array([1.0, 2.0, -np.inf, -np.inf])) == -np.inf


def test_bootstrap_interval_agrees_with_scipy():
    values = np.random.default_rng(1).normal(3.0, 2.0, 40)
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=2000, rng=0
    ).confidence_interval
    np.testing.assert_allclose(bootstrap_interval(values), theirs, atol=0.1)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    low, high = bootstrap_interval(values, iqm)
    assert low < iqm(values) < high


def independent_interval(strata, statistic):
    """rliable's: every row is resampled by itself, here with the standard library."""
    rng = random.Random(0)
    rows = strata.tolist()
    found = sorted(
        statistic(np.array([rng.choices(row, k=len(row)) for row in rows])) for _ in range(4000)
    )
    return found[100], found[3900]


def test_strata_are_resampled_by_themselves():
    """Two settings far apart, seeds close together: the interval is of the seeds' spread alone."""
    strata = np.array([[0.0, 1.0, 2.0, 3.0], [100.0, 101.0, 102.0, 103.0]])
    low, high = bootstrap_interval(strata)
    assert 50 < low < 51.5 < high < 53
    np.testing.assert_allclose((low, high), independent_interval(strata, np.mean), atol=0.15)


@pytest.mark.parametrize("shape", [(1, 16), (3, 8)])
def test_interval_of_the_iqm_agrees_with_an_independent_implementation(shape):
    strata = np.random.default_rng(2).normal(10.0, 3.0, shape)
    theirs = independent_interval(strata, lambda x: scipy_stats.trim_mean(x, 0.25, axis=None))
    np.testing.assert_allclose(bootstrap_interval(strata, iqm), theirs, atol=0.2)


def test_interval_with_a_failed_run_is_a_number_or_minus_infinity():
    low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0, -np.inf]), iqm)
    assert low == -np.inf
    assert 2.0 <= high <= 3.0


def test_area_under_curve_is_the_mean_height():
    steps, returns = np.array([0, 100, 400]), np.array([0.0, 10.0, 10.0])
    assert area_under_curve(steps, returns) == (500 + 3000) / 400
    assert area_under_curve(steps[:1] + 7, returns[1:2]) == 10.0
    assert np.isnan(area_under_curve(steps[:0], returns[:0]))


def outcome(*final, area=0.0):
    final = np.array(final)
    bad = np.isneginf(final)
    return Outcome({}, [0] * len(final), [0] * len(final), 1, bad, final, np.full(len(final), area))


def test_settings_are_ranked_by_iqm_then_mean_then_area():
    best = outcome(5.0, 5.0, 5.0, 5.0)
    faster = dataclasses.replace(best, area=np.ones(4))
    failing, unlucky = outcome(9.0, 9.0, -np.inf, -np.inf), outcome(5.0, 5.0, 5.0, -np.inf)
    nothing = outcome(np.nan, np.nan, np.nan, np.nan)
    ranked = sorted([nothing, failing, unlucky, best, faster], key=lambda x: x.score, reverse=True)
    assert [id(x) for x in ranked[:3]] == [id(faster), id(best), id(unlucky)]
    assert unlucky.statistics()["diverged"] == 1
    assert unlucky.statistics()["mean"] == -np.inf


def test_what_json_cannot_write_is_swept_all_the_same():
    swept = make_settings_of(Settings(RunOptions(sweep=("max_grad_norm=0.5,inf",))))[1].swept
    endless = dataclasses.replace(outcome(1.0), swept=swept)
    assert endless.statistics()["swept"] == {"max_grad_norm": "inf"}


def test_values_are_shown_as_they_were_written():
    written = ["0.00025", "0.123456789", "1e-05", "0.1", "inf", "none"]
    settings = make_settings_of(Settings(RunOptions(sweep=(f"target_kl={','.join(written)}",))))
    assert [show("target_kl", setting.swept["target_kl"]) for setting in settings] == written
    (small, large) = make_settings_of(Settings(RunOptions(sweep=("resize=36x36,84x72",))))
    assert (small.config.resize, large.config.resize) == ((36, 36), (84, 72))
    assert show("resize", large.swept["resize"]) == "84x72"
