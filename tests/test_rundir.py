"""What is taken out of a run directory: runs, policies, videos; and directories that are none."""

import contextlib
import datetime
import errno
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from trainings import (
    PER_ITERATION,
    SMALL,
    UNEVALUATED,
    latest,
    refused,
    resume,
    rows,
    run,
    train,
)

import purejaxppo
from purejaxppo import checkpoint, cli, host, machine, render, rundir
from purejaxppo.display import Display
from purejaxppo.policy import play
from purejaxppo.types import Episode
from purejaxppo.values import ConfigError


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two settings of two seeds, after eight iterations."""
    path = tmp_path_factory.mktemp("checkpoint") / "sweep"
    sweep = ["--sweep", "learning_rate=1e-3,1e-2", "--num-seeds", "2", "--runs-per-block", "4"]
    assert train(path, 8, *sweep, "--normalize-observations") == 0
    return path


@pytest.mark.on_cpus
def test_extract_is_a_run_directory(swept, tmp_path, capsys):
    """Run 3 by itself, trained further, is what it would have been among the others."""
    whole, own = shutil.copytree(swept, tmp_path / "whole"), tmp_path / "own"
    arguments = [str(swept), "--run", "3", "--output", str(own)]
    assert cli.extract_command(arguments) == 0
    for name in ("seconds", "compile_seconds", "evaluation_seconds", "wall_seconds"):
        assert latest(own).facts[name] == latest(swept).facts[name] / 4 > 0
    more = f"--total-timesteps|{12 * PER_ITERATION}"
    assert resume(own, more) == 0
    shown = capsys.readouterr().out
    assert "not bit for bit" not in shown
    assert "on one of its devices instead of several XLA may round differently" in " ".join(
        shown.split()
    )
    assert resume(whole, more) == 0
    assert "round" not in capsys.readouterr().out
    alone, among = latest(own), latest(whole)
    for name, array in alone.arrays.items():
        np.testing.assert_array_equal(array, among.arrays[name][3:], err_msg=name)
    mine = [row for row in rows(whole / "metrics.csv") if row["run"] == "3"]
    for row in mine:
        assert row.pop("sweep.learning_rate") == "0.01"
    assert rows(own / "metrics.csv") == [row | {"run": "0"} for row in mine]
    assert cli.extract_command(arguments) == 2
    assert "in use" in capsys.readouterr().err
    (whole / "evaluation.csv").unlink()
    other = [str(whole), "--run", "3", "--output", str(tmp_path / "other")]
    assert cli.extract_command(other) == 2
    assert "evaluation.csv: has 0 rows of run 3 up to its checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_run_of_one_of_several_programs_goes_on(tmp_path):
    whole, own = tmp_path / "whole", tmp_path / "own"
    assert train(whole, 2, "--sweep", "num_envs=2,4", *UNEVALUATED) == 0
    assert cli.extract_command([str(whole), "--run", "1", "--output", str(own)]) == 0
    assert resume(own, f"--total-timesteps|{8 * PER_ITERATION}") == 0
    assert latest(own).facts["iteration"] > latest(whole, 1).facts["iteration"]


def test_load_policy_is_the_policy_that_was_trained(swept):
    """By hand: the parameters and statistics of the checkpoint, on some observations."""
    policy = purejaxppo.load_policy(swept, run=2)
    found = latest(swept)
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    mean, var = (found.arrays[f"state.obs_stats.{name}"][2] for name in ("mean", "var"))
    x = np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)
    params = found.named("state.params")
    x = np.tanh(x @ params["policy.Dense_0.kernel"][2] + params["policy.Dense_0.bias"][2])
    logits = x @ params["policy_head.kernel"][2] + params["policy_head.bias"][2]
    np.testing.assert_array_equal(policy(obs), logits.argmax(-1))
    np.testing.assert_array_equal(policy(obs[0]), logits[0].argmax())
    np.testing.assert_array_equal(policy(obs.reshape(5, 10, 4)), logits.argmax(-1).reshape(5, 10))
    assert policy(obs[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"do not end in \[4\]"):
        policy(obs[:, :3])
    sampled = [policy(obs, jax.random.key(i)) for i in range(200)]
    share = np.mean(sampled, axis=0)
    expected = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
    assert np.abs(share - expected).max() < 0.2


def shown(capsys, *arguments):
    assert cli.evaluate_command([str(x) for x in arguments]) == 0
    return capsys.readouterr().out


def test_evaluate_stops_after_the_policy_that_plays(swept, capsys, monkeypatch):
    """And shows what it reached."""

    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        return Episode(np.array([True]), np.array([9.0]), np.array([3]))

    monkeypatch.setattr(cli, "play", interrupted)
    assert cli.evaluate_command([str(swept)]) == 130
    table, stopped = capsys.readouterr().out.split("stopped: ")
    assert "learning_rate=0.001" in table
    assert "9.00" in table
    assert "learning_rate=0.01" not in table
    assert stopped == "3 runs were not played\n"


def test_evaluate(swept, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        cli.evaluate_command([str(swept), "--episodes", "1.5"])
    assert "argument --episodes: '1.5' is not a whole number" in capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "200")
    first = shown(capsys, swept, "--episodes", "40", "--run", "1")
    assert first == shown(capsys, swept, "--episodes", "40", "--run", "1")
    assert first != shown(capsys, swept, "--episodes", "40", "--run", "1", "--seed", "1")
    assert first != shown(capsys, swept, "--episodes", "40", "--run", "1", "--sampled")
    all_runs = shown(capsys, swept, "--episodes", "4")
    assert all(f"run {number}, learning_rate=" in all_runs for number in range(4))
    table = [row for row in rows(swept / "evaluation.csv") if row["run"] == "1"]
    best = max(table, key=lambda row: float(row["return_mean"]))
    assert f"iteration {best['iteration']}" in shown(capsys, swept, "--run", "1", "--best")
    played = play(purejaxppo.load_policy(swept, run=1), 40)
    assert f"{played.score.mean():.2f}" in first
    assert f", {played.length.min()} ... {played.length.max()}" in first


def test_wrong_runs(swept, trained, tmp_path, capsys, monkeypatch):
    def error(*arguments):
        assert cli.extract_command([*map(str, arguments), "--output", str(tmp_path / "x")]) == 2
        return capsys.readouterr().err

    assert "--run 4: " in error(swept, "--run", "4")
    assert "has runs 0 ... 3" in error(swept, "--run", "-1")
    assert "has 4 runs: give --run 0 ... 3, or --best" in error(swept)
    assert "there is no such directory" in error(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "not a run directory: there is no config.yaml in it" in error(tmp_path / "empty")
    assert not (tmp_path / "x").exists()
    monkeypatch.chdir(trained.parent)
    assert cli.evaluate_command(["run", "--episodes", "2"]) == 0
    shutil.rmtree(shutil.copytree(trained, tmp_path / "bare") / "checkpoints")
    assert "no checkpoint: its runs diverged, or it is gone" in error(tmp_path / "bare")
    (tmp_path / "bare" / "summary.json").unlink()
    assert "there is no checkpoint yet" in error(tmp_path / "bare")
    assert "--env Acrobot-v1: " in error(swept, "--run", "1", "--env", "Acrobot-v1")


def test_what_has_no_policy_is_left_out(tmp_path, monkeypatch, capsys):
    """A sweep that was interrupted in its first program, and one of which a run diverged."""
    monkeypatch.setenv("COLUMNS", "200")
    path, other = tmp_path / "run", tmp_path / "other"
    with monkeypatch.context() as patch:
        stop = iter([signal.SIGTERM])
        patch.setattr(Display, "update", lambda *_: [signal.raise_signal(s) for s in stop])
        assert train(path, 8, "--sweep", "num_envs=2,4") == 128 + signal.SIGTERM
    capsys.readouterr()
    assert cli.evaluate_command([str(path), "--episodes", "2"]) == 0
    assert "1 runs diverged or have not begun" in capsys.readouterr().out
    assert cli.evaluate_command([str(path), "--run", "1"]) == 2
    assert "there is no checkpoint of run 1, num_envs=4, seed 0 yet" in capsys.readouterr().err
    assert train(other, 6, "--sweep", "learning_rate=1e-3,1e25") == 0
    capsys.readouterr()
    assert cli.evaluate_command([str(other), "--episodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "run 0, learning_rate=0.001" in shown
    assert "1 runs diverged or have not begun" in shown


def test_devices_that_are_not_there_are_one_line(swept, monkeypatch, capsys):
    """JAX_PLATFORMS=cuda without its packages fails an assertion of JAX's."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert cli.evaluate_command([str(swept)]) == 2
    assert capsys.readouterr().err.startswith(
        "purejaxppo: error: JAX_PLATFORMS=cuda: JAX has no such"
    )


def test_extract_the_best(swept, tmp_path, capsys):
    best = purejaxppo.load_policy(swept, best=True).run
    assert cli.extract_command([str(swept), "--best", "--output", str(tmp_path / "own")]) == 0
    settings = yaml.safe_load((tmp_path / "own" / "config.yaml").read_text())
    swept_rate = best.setting.swept["learning_rate"]
    assert (settings["seed"], settings["learning_rate"]) == (best.seed, swept_rate)
    both = [str(swept), "--run", "1", "--best", "--output", str(tmp_path / "x")]
    assert cli.extract_command(both) == 2
    assert "--run 1 and --best both say which run" in capsys.readouterr().err


def test_the_best_run_is_the_one_with_the_highest_evaluation(swept):
    table = rows(swept / "evaluation.csv")
    best = max(table, key=lambda row: float(row["return_mean"]))
    assert purejaxppo.load_policy(swept, best=True).run.number == int(best["run"])


def test_a_directory_from_a_stranger_runs_no_code(copied, tmp_path, capsys):
    """Neither where its configuration names a module, nor by what YAML can do."""
    file = copied / "config.yaml"
    values = yaml.safe_load(file.read_text())
    marker = tmp_path / "marker"
    bad = values | {"env": "os:system", "env_args": {"command": f"touch {marker}"}}
    file.write_text(yaml.safe_dump(bad))
    assert "would run the code of os:system" in refused(capsys, "--resume", copied)
    assert cli.evaluate_command([str(copied)]) == 2
    file.write_text(f"env: !!python/object/apply:os.system ['touch {marker}']")
    assert "not YAML" in refused(capsys, "--resume", copied)
    assert not marker.exists()


def test_arrays_of_one_name_are_not_saved_as_one():
    with pytest.raises(ConfigError, match="names of different arrays are the same"):
        checkpoint.flatten("state", {"a.b": np.ones(1), "a": {"b": np.zeros(1)}})


def test_nothing_is_pickled(swept, trained):
    for directory in (swept, trained):
        for path in directory.rglob("*"):
            assert path.suffix not in (".pkl", ".pickle")
            if path.is_file():
                assert not path.read_bytes().startswith(b"\x80")


def test_no_checkpoints(tmp_path, capsys):
    path = tmp_path / "run"
    words = "|".join([*SMALL.split(), "--keep", "0", "--eval-episodes", "0"])
    assert run(words, "--total-timesteps|64", "--run-dir", path) == 0
    assert not (path / "checkpoints").exists()


def test_export_and_render_commands(swept, tmp_path, capsys):
    assert cli.export_command([str(swept), "--best", "--output", str(tmp_path / "policy")]) == 0
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert {"policy.stablehlo", "policy.npz", "policy.py", "policy.json"} <= names
    film = tmp_path / "film.gif"
    arguments = [str(swept), "--run", "1", "--episodes", "2", "--seed", "3"]
    assert cli.render_command([*arguments, "--output", str(film)]) == 0
    assert film.stat().st_size > 1000
    played = play(purejaxppo.load_policy(swept, run=1), 2, seed=3)
    shown = capsys.readouterr().out
    assert f"returns {', '.join(f'{x:g}' for x in played.score)}; written: {film}" in shown
    assert cli.render_command([*arguments[:3], "--episodes", "0"]) == 2
    assert "--episodes 0: must be at least 1" in capsys.readouterr().err


def test_videos_during_a_training(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run"
    assert train(path, 5, "--video-every", str(2 * PER_ITERATION)) == 0
    names = sorted(file.name for file in (path / "videos").iterdir())
    assert names == [f"run0-{PER_ITERATION * i:012d}.gif" for i in (2, 4, 5)]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(render, "_picture", lambda *_: [][0])
        assert train(tmp_path / "undrawn", 5, "--video-every", "64") == 0
    assert capsys.readouterr().out.count("no video: IndexError: list index out of range") == 3
    status = train(tmp_path / "bandit", 5, "--env", "SimpleBandit-bsuite", "--video-every", "64")
    assert status == 2
    out, err = capsys.readouterr()
    assert "SimpleBandit-bsuite" in err
    assert "compiled" not in out
    assert not (tmp_path / "bandit").exists()


def test_an_extra_that_came_since_changes_nothing():
    before = {"versions": {k: v for k, v in machine.versions().items() if k != "gymnax"}}
    assert host._changed_versions(before) == []
    before["versions"]["jax"] = "0.1"
    assert host._changed_versions(before) == [f"jax 0.1 -> {jax.__version__}"]


def test_two_directories_of_one_second(tmp_path, monkeypatch):
    class Still(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(rundir, "datetime", Still)
    monkeypatch.chdir(tmp_path)
    settings = cli.parse(["--env", "a module:MyEnv"])
    with contextlib.ExitStack() as held:
        made = [rundir.create(settings, held).path.name for _ in range(3)]
    first = "a-module-MyEnv-20260102-030405"
    assert made == [first, f"{first}-2", f"{first}-3"]


def test_a_directory_that_could_not_be_made_is_not_in_use_afterwards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, (named, held) = cli.parse([]), (cli.parse(["--run-dir", "a"]), contextlib.ExitStack())
    (tmp_path / "runs").symlink_to("disk that is not mounted")
    with pytest.raises(ConfigError, match="--run-dir runs: File exists"):
        rundir.create(settings, held)

    def fill_disk(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, held:
        patch.setattr(Path, "write_text", fill_disk)
        with pytest.raises(ConfigError, match="a: No space left"):
            rundir.create(named, held)
    with held:
        assert (rundir.create(named, held).path / "config.yaml").stat().st_size
