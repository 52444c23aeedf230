"""Tables: intervals, pooling, and what is left empty."""

import csv
import itertools
import os
import types

import numpy as np
import pytest

from purejaxppo.config import Config, Hyper
from purejaxppo.loggers import METRICS_COLUMNS, EvaluationTable, MetricsTable, Tables, pool
from purejaxppo.sweep import Run, Setting
from purejaxppo.types import Metrics


def metrics(**values):
    """[I, R] of every metric, 1 where not given."""
    shape = np.shape(next(iter(values.values())))
    filled = {name: np.ones(shape) for name in Metrics.__dataclass_fields__}
    return filled | {name: np.asarray(value) for name, value in values.items()}


def runs(*seeds, swept=()):
    setting = Setting(dict(swept), Config(), Hyper())
    return [Run(number, seed, setting) for number, seed in enumerate(seeds)]


def test_pool_weighs_episodes_by_their_count():
    pooled = pool(
        metrics(
            episode_return=[[10.0, np.nan], [20.0, np.nan], [np.nan, 5.0]],
            episodes=[[1, 0], [3, 0], [0, 2]],
            value_mean=[[1.0, 2.0], [2.0, 2.0], [3.0, 5.0]],
            invalid_steps=[[1, 0], [2, 0], [0, 0]],
        )
    )
    np.testing.assert_allclose(pooled["episode_return"], [17.5, 5.0])
    np.testing.assert_array_equal(pooled["episodes"], [4, 2])
    np.testing.assert_array_equal(pooled["invalid_steps"], [3, 0])
    np.testing.assert_allclose(pooled["value_mean"], [2.0, 3.0])


def test_pool_hides_no_divergence_and_invents_no_episode():
    pooled = pool(
        metrics(
            policy_loss=[[np.nan], [1.0]],
            explained_variance=[[np.nan], [0.5]],
            episode_length=[[np.nan], [np.nan]],
            episodes=[[0], [0]],
        )
    )
    assert np.isnan(pooled["policy_loss"]).all()
    assert np.isnan(pooled["episode_length"]).all()
    np.testing.assert_allclose(pooled["explained_variance"], [0.5])


def test_intervals_run_across_chunks_and_the_last_is_shorter(tmp_path):
    with Tables(tmp_path, {}) as tables:
        table = MetricsTable(tables.metrics, runs(7), interval=3, steps_per_iteration=10)
        for part in ([0.0, 1.0], [2.0], [3.0, 4.0, 5.0, 6.0]):
            table.add(metrics(value_mean=np.array(part)[:, None]))
        table.flush()
        table.flush()
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["iteration"], r["env_steps"], r["value_mean"]) for r in rows] == [
        ("3", "30", "1"), ("6", "60", "4"), ("7", "70", "6"),
    ]  # fmt: skip


def test_swept_values_are_columns_as_they_are_written_on_the_command_line(tmp_path):
    swept = {"torso_layers": (64, 32), "target_kl": None, "gamma": 0.9, "shared_torso": True}
    swept["cnn_layers"] = ((32, 8, 4), (64, 4, 2))
    with Tables(tmp_path, swept) as tables:
        table = MetricsTable(tables.metrics, runs(7, swept=swept), 1, 10)
        table.add(metrics(value_mean=np.zeros((1, 1))))
    with (tmp_path / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    shown = {name: row[f"sweep.{name}"] for name in swept}
    assert shown == {
        "torso_layers": "64x32", "target_kl": "none", "gamma": "0.9", "shared_torso": "true",
        "cnn_layers": "32x8x4,64x4x2",
    }  # fmt: skip


def test_a_table_is_never_overwritten(tmp_path):
    (tmp_path / "metrics.csv").write_text("precious")
    with pytest.raises(FileExistsError):
        Tables(tmp_path, {})
    assert (tmp_path / "metrics.csv").read_text() == "precious"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_table_that_does_not_fit_is_named_and_the_others_are_closed(tmp_path):
    """What was not taken is tried again when it is closed, and fails again."""
    tables = Tables(tmp_path, {})
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, tables.metrics._file.fileno())
    os.close(full)
    row = {name: [1.0] for name in METRICS_COLUMNS}
    with pytest.raises(OSError, match=r"metrics\.csv"):
        tables.metrics.write(row)
    with pytest.raises(OSError, match=r"metrics\.csv"):
        tables.__exit__()
    assert tables.evaluation._file.closed


def test_unfinished_episodes_do_not_count(tmp_path):
    episodes = types.SimpleNamespace(
        ended=np.array([[True, False, True], [False, False, False]]),
        score=np.array([[1.0, 100.0, 3.0], [9.0, 9.0, 9.0]]),
        length=np.array([[5, 100, 7], [9, 9, 9]]),
    )
    with Tables(tmp_path, {}) as tables:
        EvaluationTable(tables.evaluation, runs(3, 4)).add(episodes, iteration=2, env_steps=20)
    assert (tmp_path / "evaluation.csv").read_text().splitlines()[1:] == [
        "0,3,2,20,2,1,6,2",
        "1,4,2,20,,,,0",
    ]


@pytest.mark.parametrize("interval", [1, 3])
def test_chunks_leave_no_trace(tmp_path, interval):
    """The same rows, however many iterations come at a time; and what waits is nothing or more."""
    rng = np.random.default_rng(0)
    every = metrics(episode_return=rng.normal(size=(20, 2)), episodes=rng.integers(0, 3, (20, 2)))
    written = []
    for name, cuts in (("a", [1, 4, 5, 17]), ("b", list(range(1, 20)))):
        (tmp_path / name).mkdir()
        with Tables(tmp_path / name, {}) as tables:
            table = MetricsTable(tables.metrics, runs(7, 8), interval, steps_per_iteration=10)
            for start, stop in itertools.pairwise([0, *cuts, 20]):
                table.add({k: x[start:stop] for k, x in every.items()})
                assert table.until == stop // interval * interval
                assert len(table.pending.get("episodes", [])) == stop % interval
                assert bool(table.pending) == bool(stop % interval)
            table.flush()
            assert table.rows == -(-20 // interval)
        written.append((tmp_path / name / "metrics.csv").read_text())
    assert written[0] == written[1]
    assert written[0].count("\n") == 1 + 2 * -(-20 // interval)
