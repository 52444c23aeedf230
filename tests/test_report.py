"""Statistics over runs, the summary and the learning curve."""

import json

import numpy as np
from scipy import stats as scipy_stats

from purejaxppo.report import bootstrap_interval, curve, iqm, plot_learning_curve, write_summary


def test_iqm_is_scipys_trimmed_mean_where_quarters_are_whole():
    values = np.random.default_rng(0).normal(size=(5, 12))
    np.testing.assert_allclose(iqm(values), scipy_stats.trim_mean(values, 0.25, axis=-1))


def test_iqm_of_few_runs_counts_the_edges_in_part():
    assert iqm(np.array([3.0])) == 3.0
    assert iqm(np.array([1.0, 2.0])) == 1.5
    # The middle half of six is one and a half on either side: (0.5 * 2 + 3 + 4 + 0.5 * 5) / 3.
    assert iqm(np.array([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])) == 3.5
    np.testing.assert_allclose(iqm(np.array([0.0, 1.0, 10.0])), (0.25 * 0 + 1 + 0.25 * 10) / 1.5)


def test_bootstrap_interval_agrees_with_scipy():
    values = np.random.default_rng(1).normal(3.0, 2.0, 40)
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=2000, rng=0
    ).confidence_interval
    np.testing.assert_allclose(bootstrap_interval(values), theirs, atol=0.1)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    low, high = bootstrap_interval(values, iqm)
    assert low < iqm(values) < high


def test_summary_has_no_numbers_json_does_not_know(tmp_path):
    write_summary(tmp_path / "s.json", {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": 1}})
    assert json.loads((tmp_path / "s.json").read_text()) == {
        "a": None,
        "b": [1.0, None],
        "c": {"d": 1},
    }


def rows(returns):
    return [
        {"env_steps": 100 * (i + 1), "episode_return": value, "return_mean": value}
        for i, per_run in enumerate(returns)
        for value in per_run
    ]


def test_curve_leaves_out_steps_where_a_run_has_no_number():
    steps, values = curve(rows([[np.nan, 1.0], [2.0, 3.0], [4.0, 5.0]]), "episode_return")
    np.testing.assert_array_equal(steps, [200, 300])
    np.testing.assert_array_equal(values, [[2.0, 3.0], [4.0, 5.0]])


def test_learning_curve_is_drawn_with_and_without_data(tmp_path):
    plot_learning_curve(tmp_path / "a.png", "x", rows([[1.0, 2.0], [2.0, 3.0]]), rows([[1.0, 1.0]]))
    plot_learning_curve(tmp_path / "b.png", "x", [], [])
    full, empty = ((tmp_path / name).stat().st_size for name in ("a.png", "b.png"))
    assert full > empty > 1000
