"""What a report reads from the tables of a run directory, and writes."""

import dataclasses
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from purejaxppo import cli, plots
from purejaxppo.config import RunOptions, Settings
from purejaxppo.display import Display
from purejaxppo.loggers import Tables, swept_columns
from purejaxppo.plots import draw_curves
from purejaxppo.report import (
    Curve,
    Result,
    compare,
    make_curve,
    points_of,
    read_report,
    write_config,
    write_reports,
    write_summary,
)
from purejaxppo.sweep import Outcome, make_runs, make_settings_of
from purejaxppo.types import Metrics


def test_summary_has_no_numbers_json_does_not_know(tmp_path):
    write_summary(tmp_path / "s.json", {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": 1}})
    assert json.loads((tmp_path / "s.json").read_text()) == {
        "a": None,
        "b": [1.0, None],
        "c": {"d": 1},
    }


def test_curve_leaves_out_steps_where_a_run_has_no_number():
    nan = float("nan")
    table = {
        0: {100: nan, 200: 2.0, 300: 4.0, 400: nan},
        1: {100: 1.0, 200: nan, 300: 5.0, 400: 6.0},
        2: {100: nan},
    }
    steps, returns = make_curve([points_of(table, run) for run in (0, 1, 2)])
    np.testing.assert_array_equal(steps, [200, 300])
    np.testing.assert_array_equal(returns, [[2.0, 3.0], [4.0, 5.0]])
    assert make_curve([points_of(table, 2)]).returns.shape == (0, 1)
    assert make_curve([]).returns.shape == (0, 0)


def test_a_run_is_measured_at_its_own_last_episode(run_dirs, tmp_path):
    """Where there is no evaluation, and episodes do not end in every interval."""
    shutil.copytree(run_dirs / "b", tmp_path / "b")
    columns = "run,env_steps,policy_loss,value_loss,grad_norm,invalid_steps,episode_return\n"
    points = [(0, 100, 5), (1, 100, ""), (0, 200, ""), (1, 200, 7), (0, 300, 9), (1, 300, "")]
    rows = "".join(f"{run},{steps},1,1,1,0,{value}\n" for run, steps, value in points)
    (tmp_path / "b" / "metrics.csv").write_text(columns + rows)
    (tmp_path / "b" / "evaluation.csv").write_text(
        "run,env_steps,return_mean,return_std,episodes\n"
    )
    (result,) = read_report(tmp_path / "b").results
    np.testing.assert_array_equal(result.outcome.final, [9, 7])
    np.testing.assert_array_equal(result.outcome.area, [7, 7])


def test_a_training_that_was_killed_has_a_report_too(run_dirs, tmp_path):
    """Its tables say who diverged, and the last row was cut off."""
    shutil.copytree(run_dirs / "a", tmp_path / "a")
    path = tmp_path / "a" / "metrics.csv"
    header, *table = path.read_text().splitlines()
    loss = header.split(",").index("policy_loss")
    cells = table[-3].split(",")
    assert cells[0] == "1"
    table[-3] = ",".join([*cells[:loss], "", *cells[loss + 1 :]])
    path.write_text("\n".join([header, *table])[:-30])
    report = read_report(tmp_path / "a")
    diverged = [result.outcome.diverged.tolist() for result in report.results]
    assert diverged == [[False, True], [False, True]]


def test_a_row_without_its_last_cell_ends_no_report(run_dirs, tmp_path):
    """As while a training writes it."""
    shutil.copytree(run_dirs / "b", tmp_path / "b")
    path = tmp_path / "b" / "metrics.csv"
    text = path.read_text().rstrip()
    assert text.splitlines()[0].endswith(",invalid_steps")
    path.write_text(text[: text.rindex(",") + 1])
    assert read_report(tmp_path / "b").invalid_steps == [0, 0]


def a_row(values):
    return {name: [value] for name, value in values.items()}


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory):
    """Two run directories of one environment: two settings in the first, one of them diverged."""
    folder = tmp_path_factory.mktemp("report")
    for name, sweep in (("a", ("gamma=0.9,0.99",)), ("b", ())):
        path = folder / name
        path.mkdir()
        settings = Settings(RunOptions(num_seeds=2, sweep=sweep))
        write_config(path / "config.yaml", settings)
        runs = make_runs(make_settings_of(settings), settings.run)
        with Tables(path, runs[0].setting.swept) as tables:
            for steps in (100, 200):
                for run in runs:
                    place = {
                        "run": run.number,
                        "seed": run.seed,
                        "iteration": 1,
                        "env_steps": steps,
                    }
                    place |= swept_columns(run.setting.swept)
                    value = float(steps + 10 * run.number)
                    blank = dict.fromkeys(Metrics.__dataclass_fields__, 0.0)
                    if name == "a" and run.number == 3:
                        blank["grad_norm"] = math.inf
                    tables.metrics.write(a_row(place | blank | {"episode_return": value}))
                    blank = dict.fromkeys(("return_std", "length_mean", "episodes"), 0.0)
                    tables.evaluation.write(a_row(place | blank | {"return_mean": value + 1}))
    return folder


def test_results_are_read_from_the_tables(run_dirs):
    report = read_report(run_dirs / "a")
    first, second = (result.outcome for result in report.results)
    assert (first.runs, first.seeds, first.env_steps) == ([0, 1], [0, 1], 200)
    np.testing.assert_allclose(first.final, [201, 211])
    np.testing.assert_allclose(first.area, [151, 161])
    np.testing.assert_array_equal(second.diverged, [False, True])
    np.testing.assert_allclose(second.final, [221, -np.inf])
    np.testing.assert_allclose(report.results[1].evaluation.returns, [[121], [221]])
    assert [result.name for result in report.ranked] == ["gamma=0.9", "gamma=0.99"]


def test_a_run_that_diverged_in_its_last_update_stays_so(run_dirs, tmp_path):
    """In a report of the directory later: its losses are numbers."""
    path = shutil.copytree(run_dirs / "b", tmp_path / "b")
    assert write_reports(path, {"diverged_runs": [1]}, print)["settings"][0]["diverged"] == 1
    (result,) = read_report(path).results
    np.testing.assert_array_equal(result.outcome.final, [201, -np.inf])


def test_episodes_that_were_given_up_are_told(run_dirs, tmp_path, capsys):
    """They do not count, and may be the worst."""
    shutil.copytree(run_dirs / "b", tmp_path / "b")
    columns = "run,env_steps,return_mean,return_std,episodes\n"
    (tmp_path / "b" / "evaluation.csv").write_text(columns + "0,200,5,1,126\n1,200,,,0\n")
    clocks = dict.fromkeys(("steps_per_second", "compile_seconds", "evaluation_seconds"), 1.0)
    facts = clocks | {"wall_seconds": 3.0, "diverged_runs": []}
    summary = write_reports(tmp_path / "b", facts, print)
    assert summary["evaluation"]["episodes"] == 128
    assert summary["evaluation"]["given_up_per_run"] == [2, 128]
    settings = read_report(tmp_path / "b").settings
    Display().results(summary, make_runs(make_settings_of(settings), settings.run))
    shown = capsys.readouterr().out
    assert "evaluation, 128 episodes a run" in shown
    assert "130 episodes were given up after 10,000 steps" in shown


def test_a_plot_that_fails_costs_no_table(run_dirs, tmp_path, monkeypatch):
    """As where Matplotlib cannot be imported."""
    shutil.copytree(run_dirs / "a", tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    write_reports(tmp_path / "a", {"diverged_runs": [3]}, said.append)
    (line,) = said
    assert re.search("no plots: .*matplotlib.*; `purejaxppo report .*a` draws them", line)
    for name in ("summary.json", "sweep.csv", "best.yaml"):
        assert (tmp_path / "a" / name).stat().st_size


def test_a_setting_without_an_evaluation_is_not_ranked_by_its_training(run_dirs, tmp_path):
    """Where others have one: sampled actions are not the most likely ones."""
    shutil.copytree(run_dirs / "a", tmp_path / "a")
    (tmp_path / "a" / "evaluation.csv").write_text(
        "run,env_steps,return_mean,return_std,episodes\n2,200,1,0,1\n"
    )
    first, second = (result.outcome for result in read_report(tmp_path / "a").results)
    assert np.isnan(first.final).all()
    np.testing.assert_array_equal(second.final, [1, -np.inf])


def test_curves_say_how_many_runs_are_missing(run_dirs, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: shown.append(self))
    draw_curves(tmp_path / "c.png", {"": read_report(run_dirs / "a").ranked})
    alone = read_report(run_dirs / "b", diverged=[0, 1]).results
    draw_curves(tmp_path / "c.png", {"": alone})
    labels = [figure.axes[0].get_legend_handles_labels()[1] for figure in shown]
    assert labels == [
        ["gamma=0.9", "gamma=0.99 (1 of 2 runs)"],
        ["training episodes (0 of 2 runs)"],
    ]
    assert "IQM of 2 runs" in shown[0].axes[0].get_ylabel()


def test_the_many_without_a_name_may_have_no_curve(run_dirs, tmp_path):
    good, half = read_report(run_dirs / "a").ranked
    (gone,) = read_report(run_dirs / "b", diverged=[0, 1]).results
    draw_curves(tmp_path / "c.png", {"": [good] * 8 + [half, gone]})
    assert (tmp_path / "c.png").exists()


def test_report_command_redraws_and_compares(run_dirs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "c.png"
    directories = [str(run_dirs / name) for name in "ab"]
    assert cli.report_command([*directories, "--output", str(output)]) == 0
    assert cli.report_command([*directories, "--output", str(tmp_path / "c.xyz")]) == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    # b and the surviving setting of a are equal; the sort keeps their order.
    assert [line.split()[1] for line in lines] == ["a,", "b", "a,"]
    assert cli.report_command(directories[1:]) == 0
    assert f"│ {directories[1]} │" in capsys.readouterr().out
    for path in (output, run_dirs / "a" / "sweep.png", run_dirs / "b" / "learning_curve.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_report_command_where_a_plot_cannot_be_drawn_again(run_dirs, tmp_path, capsys):
    """As in somebody else's directory; the others are, and all are compared, or one is alone."""
    paths = [str(shutil.copytree(run_dirs / name, tmp_path / name)) for name in "ab"]
    (tmp_path / "a" / "learning_curve.png").unlink(missing_ok=True)
    (tmp_path / "a" / "learning_curve.png").mkdir()
    output = tmp_path / "c.png"
    for given in (paths, paths[:1]):
        assert cli.report_command([*given, "--output", str(output)]) == 0
        assert output.read_bytes().startswith(b"\x89PNG")
        output.unlink()
        shown = capsys.readouterr().out
        assert "gamma=0.99" in shown
        assert f"not drawn again: [Errno 21] Is a directory: '{paths[0]}/learning" in shown
        drawn = ", ".join([*given[1:], str(output)])
        assert shown.endswith(f"drawn in {drawn}\n")
    assert cli.report_command(paths[:1]) == 0
    assert capsys.readouterr().out.endswith("nothing was drawn\n")


def test_report_command_without_matplotlib(run_dirs, tmp_path, monkeypatch, capsys):
    path = str(shutil.copytree(run_dirs / "a", tmp_path / "a"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.report_command([path]) == 0
    shown = capsys.readouterr().out
    assert "not drawn again: import of matplotlib.figure halted" in shown
    assert "gamma=0.99" in shown
    assert cli.report_command([path, "--output", str(tmp_path / "c.png")]) == 2
    assert capsys.readouterr().err.startswith("purejaxppo: error: import of matplotlib.figure")


def test_report_command_of_what_is_no_run_directory(tmp_path, capsys):
    assert cli.report_command([str(tmp_path / "nothing")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("purejaxppo: error: ")
    assert "config.yaml" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.csv", "", "not a table with a column run"),
        (
            "metrics.csv",
            "run,env_steps,episode_return,invalid_steps,policy_loss,value_loss,grad_norm\n"
            "0,9,1,0,1,1,1\nzz,9,1,0,1,1,1\n",
            "metrics.csv, line 3: invalid literal for int() with base 10: 'zz'",
        ),
        ("config.yaml", "gamma: [", "not YAML"),
        ("config.yaml", "", "metrics.csv: has a run 1; config.yaml says 1 in all"),
        ("config.yaml", "sweep: [gamma]", "write name=value"),
    ],
)
def test_report_command_of_damaged_files(run_dirs, tmp_path, capsys, file, text, message):
    shutil.copytree(run_dirs / "a", tmp_path / "a")
    (tmp_path / "a" / file).write_text(text)
    assert cli.report_command([str(tmp_path / "a")]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_report_command_leaves_out_what_cannot_be_read(run_dirs, tmp_path, capsys):
    (tmp_path / "c").mkdir()
    shutil.copy(run_dirs / "b" / "config.yaml", tmp_path / "c")
    paths = [str(tmp_path / "c"), str(run_dirs / "b")]
    assert cli.report_command([*paths, "--output", str(tmp_path / "c.png")]) == 2
    told = f"left out: {tmp_path / 'c' / 'metrics.csv'}: No such file or directory"
    shown = capsys.readouterr()
    assert shown.err == f"purejaxppo: error: {told}\n"
    assert f"drawn in {run_dirs / 'b'}, {tmp_path / 'c.png'}" in shown.out


def test_report_command_shows_all_settings(run_dirs, tmp_path, capsys):
    paths = [shutil.copytree(run_dirs / "b", tmp_path / f"run{i}") for i in range(12)]
    assert cli.report_command([*map(str, paths), "--output", str(tmp_path / "c.png")]) == 0
    shown = capsys.readouterr().out
    assert all(f" run{i} " in shown for i in range(12))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e-4, 3e-4, 1e-3], True),
        ([0.01, 0.1], True),
        ([0.9, 0.99], False),
        ([0.0, 1e-3, 1.0], False),
        ([0.001, 0.02, 0.04, 0.06, 0.08, 0.1], False),
    ],
)
def test_axes_are_logarithmic_where_values_are(values, expected):
    assert plots._suits_log(np.array(values)) == expected


def test_sweeps_of_many_values(tmp_path, monkeypatch):
    """One seed a setting: no interval, and only so many names that they can be read."""
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: shown.append(self))
    sweep = ("torso_layers=" + ",".join(map(str, range(1, 51))), "gamma=0.9,0.99")
    settings = Settings(RunOptions(sweep=sweep))
    runs = make_runs(make_settings_of(settings), settings.run)
    empty = Curve(np.zeros(0), np.zeros((0, 1)))
    results = []
    for run in runs:
        final = np.array([float(run.number)])
        outcome = Outcome(run.setting.swept, [run.number], [0], 1, final < 1, final, final)
        results.append(Result("", run.setting, empty, empty, outcome))
    plots.draw_sweep(tmp_path / "s.png", "", results)
    layers, gamma, grid = shown[0].axes[:3]
    assert len(layers.get_xticks()) == len(grid.get_yticks()) == 17
    assert layers.get_xticklabels()[1].get_text() == "4"
    squares = [line for line in gamma.lines if line.get_marker() == "s"]
    assert [float(line.get_ydata()[0]) for line in squares] == [49.0, 50.0]


def test_directories_of_one_name_are_told_apart(run_dirs, tmp_path):
    reports = [read_report(shutil.copytree(run_dirs / "b", tmp_path / x / "run")) for x in "ab"]
    (results,) = compare(reports, tmp_path / "c.png").values()
    names = {result.name for result in results}
    assert names == {str(tmp_path / x / "run") for x in "ab"}


def test_every_directory_has_a_name_in_the_comparison(run_dirs, tmp_path, monkeypatch):
    """Matplotlib keeps names that begin with _ to itself."""
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: shown.append(self))
    monkeypatch.chdir(shutil.copytree(run_dirs / "b", tmp_path / "_here"))
    compare([read_report(Path(".")), read_report(run_dirs / "b")], tmp_path / "c.png")
    assert shown[0].axes[0].get_legend_handles_labels()[1] == [" _here", "b"]


def test_ranking_says_how_many_seeds_there_are(capsys):
    numbers = {"iqm_interval": (0, 1), "iqm": 0, "mean": 0, "area_under_curve": 0, "diverged": 0}
    settings = [(name, numbers | {"runs": list(range(n))}) for name, n in (("a", 3), ("b", 5))]
    Display().ranking(settings)
    Display().ranking(settings[:1] * 2)
    shown = capsys.readouterr().out
    assert "2 settings x 3 ... 5 seeds" in shown
    assert "2 settings x 3 seeds" in shown


def test_ranking_shows_whole_names_and_no_numbers_that_there_are_not(capsys, monkeypatch):
    """A name is longer than the table, and a single seed has no interval."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "learning_rate=0.00025, clip_eps=0.12345, gae_lambda=0.95, ent_coef=1e-07"
    outcome = Outcome({}, [0], [0], 100, np.zeros(1, bool), np.full(1, 7.5), np.full(1, np.nan))
    assert np.isnan(outcome.statistics()["iqm_interval"]).all()
    Display().ranking([(name, outcome.statistics())])
    shown = capsys.readouterr().out
    assert "1 setting x 1 seed" in shown
    assert "nan" not in shown
    cells = [line.split("│")[1:-1] for line in shown.splitlines() if "│" in line]
    assert "".join(cell[0].strip() for cell in cells).replace(" ", "") == name.replace(" ", "")
    assert [cell.strip() for cell in cells[0][1:]] == ["7.5", "", "7.5", "", ""]


def test_each_environment_has_a_panel_and_a_ranking(run_dirs, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: shown.append(self))
    cartpole = [read_report(run_dirs / name) for name in "ab"]
    reports = []
    for env in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "Catch-bsuite"):
        for report in cartpole:
            config = dataclasses.replace(report.settings.config, env=env)
            settings = dataclasses.replace(report.settings, config=config)
            path = report.path / env
            reports.append(dataclasses.replace(report, path=path, settings=settings))
    ranked = compare(reports, tmp_path / "c.png")
    settings = {len(results) for results in ranked.values()}
    assert settings == {sum(len(report.results) for report in cartpole)}
    (figure,) = shown
    assert [axes.get_title() for axes in figure.axes] == [f"{env}, PPO" for env in ranked]
    boxes = [axes.get_position() for axes in figure.axes]
    assert all(0 < box.x0 < box.x1 < 1 and 0 < box.y0 < box.y1 < 1 for box in boxes)
    assert boxes[0].x1 < boxes[1].x0 < boxes[1].x1 < boxes[2].x0
    assert boxes[3].y1 < boxes[0].y0
    assert boxes[3].x0 == boxes[0].x0
