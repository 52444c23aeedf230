"""Nothing lost: what is resumed equals what was never stopped, and what is damaged is refused."""

import gc
import os
import shutil
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from trainings import (
    MODULE,
    PER_ITERATION,
    SMALL,
    UNEVALUATED,
    assert_same,
    has_rows,
    latest,
    read_summary,
    refused,
    resume,
    rows,
    run,
    start,
    start_resumed,
    train,
    wait_for,
)

import purejaxppo
from purejaxppo import checkpoint, cli, executables, machine, program, rundir
from purejaxppo.checkpoint import Writer
from purejaxppo.display import Display
from purejaxppo.values import ConfigError


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ("--env Pendulum-v1 --normalize-observations --normalize-rewards --keep 1", 32),
        ("--env FrozenLake-misc --reset-mode fresh --target-kl 0.001", 32),
        ("--desired-kl 0.01 --minibatches sequences --checkpoint-iterations 100", 32),
        (
            "--env MemoryChain-bsuite --gru-units 8 "
            "--num-seeds 3 --sweep learning_rate=1e-3,1e-2 --runs-per-block 2",
            32,
        ),
        ("--shard environments --num-envs 8 --num-minibatches 1 --gru-units 4", 128),
    ],
)
def test_n_and_n_iterations_are_2n(tmp_path, options, batch, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for path, iterations in ((whole, 16), (halves, 8)):
        assert train(path, iterations, *options.split(), batch=batch) == 0
    capsys.readouterr()
    assert resume(halves, f"--total-timesteps|{16 * batch}") == 0
    (line,) = [x for x in capsys.readouterr().out.split("\n") if x.startswith("resumed")]
    assert "not" not in line
    assert_same(halves, whole)


TWO_PROGRAMS = ["--num-seeds", "2", "--sweep", "num_envs=2,4", "--checkpoint-iterations", "3"]


@pytest.fixture(scope="module")
def two_programs(tmp_path_factory):
    """A sweep of two programs, of 32 and of 16 iterations."""
    path = tmp_path_factory.mktemp("checkpoint") / "two"
    assert train(path, 16, *TWO_PROGRAMS, batch=64) == 0
    return path


def test_a_sweep_that_is_interrupted_while_it_is_extended(
    tmp_path, monkeypatch, two_programs, capsys
):
    """The first program's new rows come after those of the second, and stay."""
    halves = tmp_path / "halves"
    assert train(halves, 8, *TWO_PROGRAMS, batch=64) == 0
    with monkeypatch.context() as patch:
        stop = iter([signal.SIGTERM])  # once: the chunk that runs is awaited
        patch.setattr(Display, "update", lambda *_: [signal.raise_signal(s) for s in stop])
        assert resume(halves, f"--total-timesteps|{16 * 64}") == 128 + signal.SIGTERM
    assert 16 < latest(halves, 0).iteration < 32
    assert latest(halves, 1).iteration == 8
    assert resume(halves) == 0
    assert "not bit for bit" not in capsys.readouterr().out
    assert_same(halves, two_programs)


def test_a_sweep_whose_first_program_lost_its_last_checkpoint(tmp_path, two_programs):
    """Its rows after the one before go, though the second program's came later."""
    path = shutil.copytree(two_programs, tmp_path / "run")
    shutil.rmtree(path / "checkpoints" / "0" / "32")
    assert latest(path, 0).iteration == 30
    assert resume(path) == 0
    assert_same(path, two_programs)


@pytest.mark.on_cpus
def test_a_program_that_had_not_begun_keeps_its_blocks(tmp_path, monkeypatch, two_programs):
    """With fewer devices they would be larger, as another size in the programs that had."""
    path = shutil.copytree(two_programs, tmp_path / "run")
    shutil.rmtree(path / "checkpoints" / "1")
    (path / "summary.json").unlink()
    (device, *_) = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert resume(path) == 0
    assert latest(two_programs, 1).facts["block"] == latest(path, 1).facts["block"] == 1


def test_what_was_said_once_is_said_again(tmp_path, capsys):
    path = tmp_path / "run"
    assert train(path, 4, "--anneal-clip-eps", *UNEVALUATED) == 0
    for iterations in (8, 8):
        assert resume(path, f"--total-timesteps|{iterations * PER_ITERATION}") == 0
        assert "was to end at iteration 4: stretched" in capsys.readouterr().out


def test_evaluations_keep_their_distance(tmp_path):
    """By default a twentieth of the training, of that which was begun."""
    path = tmp_path / "run"
    words = "|".join([*SMALL.split(), "--no-anneal-learning-rate", "--eval-episodes", "2"])
    assert run(words, f"--total-timesteps|{40 * PER_ITERATION}", "--run-dir", path) == 0
    assert resume(path, f"--total-timesteps|{50 * PER_ITERATION}") == 0
    found = [int(row["iteration"]) for row in rows(path / "evaluation.csv")]
    assert found == list(range(2, 51, 2))


def test_rows_have_no_gap_and_no_overlap_where_a_training_is_extended(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(whole, 14, "--metrics-rows", "0") == 0
    assert train(halves, 7, "--metrics-rows", "2") == 0
    assert resume(halves, f"--total-timesteps|{14 * PER_ITERATION}") == 0
    every, pooled = (rows(path / "metrics.csv") for path in (whole, halves))
    assert [row["iteration"] for row in pooled] == ["4", "7", "11", "14"]
    for name in ("episodes", "invalid_steps"):
        assert sum(int(row[name]) for row in every) == sum(int(row[name]) for row in pooled)
    np.testing.assert_allclose(
        float(pooled[2]["entropy"]), np.mean([float(row["entropy"]) for row in every[7:11]]), 1e-5
    )


def test_nothing_left_to_do(copied, capsys):
    """Then nothing is changed either, whatever is asked of evaluations."""
    names = ("metrics.csv", "evaluation.csv", "config.yaml")
    before = {name: (copied / name).read_bytes() for name in names}
    summary = read_summary(copied)
    assert resume(copied, "--eval-episodes|5|--log|tensorboard") == 0
    assert not (copied / "tensorboard").exists()
    assert before == {name: (copied / name).read_bytes() for name in names}
    shown = capsys.readouterr().out
    assert "compiled" not in shown
    assert "nothing left to train" in shown
    again = read_summary(copied)
    assert again["wall_seconds"] > summary["wall_seconds"] > 0
    assert again | {"wall_seconds": 0} == summary | {"wall_seconds": 0}


def test_a_checkpoint_that_is_due_at_the_end_has_the_last_row(tmp_path):
    """Though it ends an interval of reporting that was not full."""
    path = tmp_path / "run"
    assert train(path, 10, "--metrics-rows", "4", "--checkpoint-iterations", "5") == 0
    before, summary = rows(path / "metrics.csv"), read_summary(path)
    assert [row["iteration"] for row in before] == ["3", "6", "9", "10"]
    assert resume(path) == 0
    assert rows(path / "metrics.csv") == before
    assert read_summary(path)["evaluation"] == summary["evaluation"]


def test_what_goes_on_has_the_time_of_all_its_parts(copied):
    first = read_summary(copied)
    assert resume(copied, f"--total-timesteps|{12 * PER_ITERATION}") == 0
    both = read_summary(copied)
    for name in ("compile_seconds", "evaluation_seconds", "wall_seconds"):
        assert both[name] > first[name] > 0
    parts = both["compile_seconds"] + both["evaluation_seconds"]
    assert both["wall_seconds"] > parts


def test_steps_that_are_swept(tmp_path, capsys):
    path = tmp_path / "run"
    assert train(path, 1, "--sweep", "total_timesteps=32,64") == 0
    assert "\n32 ... 64 steps a run" in capsys.readouterr().out
    error = refused(capsys, "--resume", path, "--total-timesteps|96")
    assert "--total-timesteps 96: " in error
    assert "config.yaml sweeps it, and what is trained cannot change\n" in error


def test_evaluations_of_another_kind_are_told_of(copied, capsys):
    more = f"--total-timesteps|{12 * PER_ITERATION}"
    assert resume(copied, more, "--eval-sampled|--eval-episodes|4") == 0
    told = "evaluations are not as those before: "
    expected = [told + "episodes 3 -> 4", told + "sampled False -> True"]
    assert read_summary(copied)["caveats"] == expected
    assert "; ".join(expected) in capsys.readouterr().out
    assert read_summary(copied)["evaluation"]["episodes"] == 4
    assert resume(copied, f"--total-timesteps|{13 * PER_ITERATION}") == 0
    assert read_summary(copied)["caveats"] == expected


@pytest.mark.on_cpus
def test_evaluations_may_be_compiled_with_another_effort(tmp_path, monkeypatch):
    assert train(tmp_path / "run", 2) == 0
    monkeypatch.setattr(program, "fingerprint", lambda *_: None)  # it is compiled again
    monkeypatch.setattr(executables, "quick_below", lambda _: 0)
    assert resume(tmp_path / "run", f"--total-timesteps|{4 * PER_ITERATION}") == 0
    caveats = read_summary(tmp_path / "run")["caveats"]
    assert "evaluations are not as those before: effort quick -> full" in caveats


def test_results_without_a_checkpoint_are_not_thrown_away(copied, capsys):
    shutil.rmtree(copied / "checkpoints")
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    assert "has results, and no checkpoint to go on from" in refused(capsys, "--resume", copied)
    assert before == {file.name: file.read_bytes() for file in copied.iterdir()}
    (copied / "summary.json").write_text("{")
    assert "has results, and no checkpoint to go on from" in refused(capsys, "--resume", copied)


def test_a_training_killed_before_its_first_checkpoint_begins_anew(copied, tmp_path, capsys):
    shutil.rmtree(copied / "checkpoints")
    (copied / "summary.json").unlink()
    assert "--gamma 0.5: " in refused(capsys, "--resume", copied, "--gamma|0.5")
    whole = tmp_path / "whole"
    assert resume(copied, "--metrics-rows|3") == 0
    assert train(whole, 11, "--metrics-rows", "3") == 0
    assert_same(copied, whole)


@pytest.mark.on_cpus
def test_more_or_fewer_devices_share_the_environments(tmp_path, capsys):
    """Saved as by one device; eight are told that the sums are in another order."""
    options = ["--num-envs", "8", "--num-minibatches", "1", "--normalize-rewards", *UNEVALUATED]
    one, eight = tmp_path / "one", tmp_path / "eight"
    assert train(one, 3, *options, batch=128) == 0
    assert train(eight, 3, *options, "--shard", "environments", batch=128) == 0
    saved, shared = latest(one), latest(eight)
    for name, array in saved.arrays.items():
        assert shared.arrays[name].shape == array.shape
    capsys.readouterr()
    assert resume(one, "--total-timesteps|768", "--shard|environments") == 0
    assert "not bit for bit: " in capsys.readouterr().out
    assert resume(eight, "--total-timesteps|768", "--shard|runs") == 0
    assert latest(one).iteration == latest(eight).iteration == 6


def test_what_is_not_bit_for_bit_is_said(copied, capsys):
    more = f"--total-timesteps|{12 * PER_ITERATION}"
    assert resume(copied, more, "--runs-per-block|3", *UNEVALUATED) == 0
    assert "not bit for bit: " in capsys.readouterr().out


@pytest.mark.on_cpus
def test_another_effort_is_said(tmp_path, capsys):
    path = tmp_path / "run"
    assert train(path, 2, *UNEVALUATED) == 0
    assert "quickly" in capsys.readouterr().out
    assert latest(path).facts["effort"] == "quick"
    assert resume(path, f"--total-timesteps|{4 * PER_ITERATION}") == 0
    assert "not bit for bit" not in capsys.readouterr().out
    steps = f"--total-timesteps|{6 * PER_ITERATION}"
    assert resume(path, steps, "--compile-effort|full") == 0
    shown = capsys.readouterr().out
    assert "not bit for bit: effort quick -> full" in " ".join(shown.split())
    assert "quickly" not in shown


def test_the_best_is_what_was_evaluated(tmp_path):
    """Each run's own best evaluation, and the parameters of that very iteration."""
    path = tmp_path / "run"
    options = ["--num-seeds", "4", "--learning-rate", "0.01", "--runs-per-block", "4"]
    options += ["--checkpoint-iterations", "4", "--keep", "100"]  # where evaluations are, too
    assert train(path, 24, *options) == 0
    table = rows(path / "evaluation.csv")
    last = latest(path)
    for place in range(4):
        curve = {
            int(row["iteration"]): float(row["return_mean"])
            for row in table
            if row["run"] == str(place)
        }
        best = max(curve, key=lambda i: (curve[i], -i))
        assert last.arrays["best.iteration"][place] == best
        np.testing.assert_allclose(last.arrays["best.score"][place], curve[best], rtol=1e-6)
        then = checkpoint.read(path / "checkpoints" / "0" / str(best))
        for name, array in then.named("state.params").items():
            np.testing.assert_array_equal(array[place], last.arrays[f"best.params.{name}"][place])


def test_an_environment_of_ones_own(tmp_path, monkeypatch, capsys):
    """With a typed key, bfloat16 and an empty array in its state; imported only when told so."""
    (tmp_path / "mine_to_resume.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    name = "mine_to_resume:MyEnv"
    assert train(tmp_path / "whole", 8, "--env", name) == 0
    assert train(tmp_path / "halves", 4, "--env", name) == 0
    more = f"--total-timesteps|{8 * PER_ITERATION}"
    assert "would run the code of" in refused(capsys, "--resume", tmp_path / "halves", more)
    assert resume(tmp_path / "halves", more, f"--env|{name}") == 0
    assert_same(tmp_path / "halves", tmp_path / "whole")
    arguments = [str(tmp_path / "whole"), "--episodes", "3"]
    assert cli.evaluate_command(arguments) == 2
    assert cli.evaluate_command([*arguments, "--env", name]) == 0


def test_names_that_mean_something_to_the_terminal(tmp_path, capsys):
    for name in ("a[/b]", "exp[lr=1]", "a:smile:b"):
        assert train(tmp_path / name, 1) == 0
        assert str(tmp_path / name) in capsys.readouterr().out.replace("\n", "")


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 16
    path.write_bytes(bytes(content))


def damage_or_checkpoint(run_dir):
    try:
        return latest(run_dir)
    except ConfigError as error:
        return str(error)


def test_a_flipped_bit_is_found_wherever_it_is(copied, capsys):
    """Damaged, or in a place that nothing is read from."""
    files = [path for path in (copied / "checkpoints/0/11").rglob("*") if path.stat().st_size > 0]
    files = [path for path in files if path.is_file()]
    good, found = latest(copied), 0
    for path in files:
        for place in (0.1, 0.3, 0.5, 0.7, 0.9):
            content = path.read_bytes()
            flip(path, place)
            again = damage_or_checkpoint(copied)
            if isinstance(again, str):
                found += 1
                assert "11: damaged" in again
                assert "the one of iteration 9 is whole: remove" in again
            else:
                assert again.facts == good.facts
                for name, array in good.arrays.items():
                    np.testing.assert_array_equal(array, again.arrays[name], strict=True)
            path.write_bytes(content)
    assert found > len(files)
    # Else Python 3.11 may collect Orbax's failed tasks while it parses, and the parser is not reentrant.
    gc.collect()
    flip(max(files, key=lambda path: path.stat().st_size), 0.5)
    assert "iteration 9 is whole" in refused(capsys, "--resume", copied)


@pytest.mark.parametrize("harm", ["truncate", "remove"])
def test_a_file_that_is_not_whole_or_gone(copied, trained, harm, capsys):
    files = [path for path in (copied / "checkpoints/0/11").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    if harm == "remove":
        largest.unlink()
    else:
        os.truncate(largest, largest.stat().st_size // 2)
    message = refused(capsys, "--resume", copied)
    assert "damaged" in message
    # What the message says: remove it, and go on from the one before.
    shutil.rmtree(copied / "checkpoints/0/11")
    assert resume(copied) == 0
    assert_same(copied, trained)


def test_no_checkpoint_is_whole(copied, capsys):
    for path in (copied / "checkpoints/0").rglob("manifest.ocdbt"):
        path.write_bytes(b"")
    assert "there is no other that is whole" in refused(capsys, "--resume", copied)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"torso_layers": [16]}, "--torso-layers [16]: "),
        ({"env": "Acrobot-v1"}, "--env Acrobot-v1: "),
        ({"gamma": 0.5}, "--gamma 0.5: "),
        ({"num_seeds": 2}, "--num-seeds 2: "),
    ],
)
def test_a_checkpoint_of_another_configuration(copied, changed, message, capsys):
    file = copied / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changed))
    assert message in refused(capsys, "--resume", copied)


def rewrite(run_dir, iteration, **facts):
    """A further checkpoint with other facts."""
    found = latest(run_dir)
    with Writer(run_dir / "checkpoints" / "0", 2, found.facts) as writer:
        writer.save(found.arrays, {"iteration": iteration, **facts})


def test_a_checkpoint_of_other_versions(copied, capsys):
    rewrite(copied, 12, iterations=12, versions={**machine.versions(), "jax": "0.9.0"})
    more = f"--total-timesteps|{16 * PER_ITERATION}"
    message = refused(capsys, "--resume", copied, more)
    assert f"made with other versions: jax 0.9.0 -> {jax.__version__}" in message
    assert resume(copied, more, "--any-version") == 0


def test_a_checkpoint_of_a_newer_format(copied, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    rewrite(copied, 12)
    monkeypatch.undo()
    assert "of format 2, and this version of purejaxppo knows 1" in refused(
        capsys, "--resume", copied
    )


def test_parameters_of_another_shape(copied):
    found = latest(copied)
    with pytest.raises(ConfigError, match=r"state\.params\.policy_head\.bias should be int32"):
        found.tree("state.params", {"policy_head": {"bias": np.zeros((1, 2), np.int32)}})


def test_the_same_numbers_in_another_type():
    """What an older version has saved in a wider type is read where nothing of it is lost."""
    arrays = {"state.obs": np.array([0.0, 1.0], np.float32)}
    found = checkpoint.Checkpoint(Path("there"), arrays, {"iteration": 1}, "")
    read = found.tree("state", {"obs": np.zeros(2, bool)})["obs"]
    assert read.dtype == bool
    np.testing.assert_array_equal(read, [False, True])
    arrays["state.obs"][0] = 0.5
    with pytest.raises(ConfigError, match=r"state\.obs should be bool"):
        found.tree("state", {"obs": np.zeros(2, bool)})


def test_two_processes_in_one_directory(copied, capsys):
    with rundir.lock(copied):
        assert "another process is training here" in refused(capsys, "--resume", copied)
    new = copied.parent / "new"
    process = start(new, *UNEVALUATED, "--metrics-rows", "0")
    wait_for(has_rows(new), process)
    assert "another process" in refused(capsys, "--resume", new)
    process.kill()
    process.communicate()


def test_rows_that_are_gone(copied, capsys):
    lines = (copied / "metrics.csv").read_text().splitlines(keepends=True)
    (copied / "metrics.csv").write_text("".join([lines[0], *lines[2:]]))
    more = f"--total-timesteps|{16 * PER_ITERATION}"
    message = refused(capsys, "--resume", copied, more)
    assert "metrics.csv: has 2 rows of run 0 up to its checkpoint, and had 3" in message
    assert (copied / "metrics.csv").exists()


def test_diverged_parameters_do_not_replace_good_ones(tmp_path, capsys):
    path = tmp_path / "run"
    words = ["--checkpoint-iterations", "1", "--learning-rate", "1e25", "--eval-episodes", "0"]
    assert run("|".join([*SMALL.split(), *words]), "--total-timesteps|320", "--run-dir", path) == 1
    for iteration in checkpoint.iterations(path / "checkpoints" / "0"):
        found = checkpoint.read(path / "checkpoints" / "0" / str(iteration))
        assert checkpoint.finite(found.named("state.params")).all()


def test_a_run_that_diverged_leaves_its_last_good_policy(tmp_path):
    path = tmp_path / "run"
    sweep = ["--sweep", "learning_rate=1e-3,1e25", "--checkpoint-iterations", "1"]
    sweep += ["--num-minibatches", "1"]  # one update, which leaves numbers
    assert train(path, 8, *sweep, "--eval-every", "0") == 0
    found = latest(path)
    np.testing.assert_array_equal(checkpoint.finite(found.named("state.params")), [True, False])
    assert checkpoint.finite(found.named("best.params")).all()
    assert found.arrays["best.iteration"][0] == 8 > found.arrays["best.iteration"][1]
    with pytest.raises(ConfigError, match=r"seed 0 diverged; --best"):
        purejaxppo.load_policy(path, run=1)
    observation = np.zeros((3, 4), np.float32)
    assert purejaxppo.load_policy(path, run=1, best=True)(observation).shape == (3,)


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of its own, which only root can make."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk(tmpfs, tmp_path):
    """One line and status 1; once there is room, the training goes on as if nothing had been."""
    path, whole = tmpfs / "run", tmp_path / "whole"
    options = ["--no-anneal-learning-rate", "--checkpoint-iterations", "100", *UNEVALUATED]
    options += ["--keep", "1000", "--metrics-rows", "0"]
    process = start(path, *options, steps="1.6e5")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.startswith("purejaxppo: error: ")
    assert err.count("\n") == 1
    assert "No space left" in err or "RESOURCE_EXHAUSTED" in err or "could not be written" in err
    assert str(path) in err
    assert "to go on: python -m purejaxppo.run --resume" in out
    subprocess.run(["mount", "-o", "remount,size=100m", str(tmpfs)], check=True)
    resumed = start_resumed(path)
    out, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert "after iteration" in out
    never = start(whole, *options, steps="1.6e5")
    assert never.wait(timeout=120) == 0
    never.communicate()
    assert_same(path, whole)


def test_a_directory_that_is_read_only(tmpfs, trained):
    shutil.copytree(trained, tmpfs / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    more = ["--total-timesteps", str(16 * PER_ITERATION)]
    for process in (start_resumed(tmpfs / "run", *more), start(tmpfs / "new")):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert err.startswith("purejaxppo: error: ")
        assert err.endswith("Read-only file system\n")
    subprocess.run(["mount", "-o", "remount,rw", str(tmpfs)], check=True)


def test_checkpoints_that_cannot_be_written_any_more(tmp_path):
    """The directory is made unusable while the training runs."""
    process = start(tmp_path / "run", "--checkpoint-iterations", "50", "--eval-every", "0")
    directory = tmp_path / "run" / "checkpoints"
    wait_for(lambda: checkpoint.iterations(directory / "0"), process)
    directory.rename(tmp_path / "aside")
    directory.write_text("")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "could not be written" in err
    assert "to go on: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run-dir", "x"], "--run-dir x: --resume goes on in"),
        (["--keep", "0"], "--resume: there are no checkpoints with --keep 0"),
        (["--config", "x.yaml"], "--config x.yaml: --resume"),
        (["--env", "Acrobot-v1"], "--env Acrobot-v1: "),
        (["--backend", "spring"], "--backend spring: "),
        (["--num-seeds", "2"], "--num-seeds 2: "),
        (["--gamma", "0.9"], "--gamma 0.9: "),
        (["--total-timesteps", "64"], "has already trained 352; give more"),
    ],
)
def test_what_cannot_be_changed(copied, arguments, message, capsys):
    assert message in refused(capsys, "--resume", copied, *arguments)
