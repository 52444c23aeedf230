"""Nothing lost: what is resumed equals what was never stopped, and what is damaged is refused."""

import contextlib
import csv
import datetime
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml

import purejaxppo
from purejaxppo import checkpoint, cli, host, loop, machine, program, rundir
from purejaxppo.checkpoint import Writer
from purejaxppo.display import Display
from purejaxppo.policy import play
from purejaxppo.values import ConfigError

# Of Orbax, which leaves an event loop open where it fails to read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.collect()  # or the warning would be another test's


SMALL = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --torso-layers 8"
PER_ITERATION = 32
# Unlike annealing, this does not depend on how long the training is meant to be.
STEADY = "--no-anneal-learning-rate --eval-every 128 --eval-episodes 3 --checkpoint-iterations 3"


def run(*arguments):
    return cli.train_command([part for text in arguments for part in str(text).split("|")])


def train(run_dir, iterations, *arguments, batch=PER_ITERATION):
    steps = f"--total-timesteps|{iterations * batch}"
    words = "|".join([*SMALL.split(), *STEADY.split(), *arguments])
    return run(words, steps, "--run-dir", run_dir)


def resume(run_dir, *arguments):
    return run("--resume", run_dir, *arguments)


def latest(run_dir, number=0):
    return checkpoint.load(run_dir / "checkpoints" / str(number))


def read_summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def assert_same(one, other):
    """The same rows, and the same bits in the last checkpoints."""
    for name in ("metrics.csv", "evaluation.csv"):
        # Programs of a sweep that are trained further write after one another again.
        lines = [(path / name).read_text().splitlines() for path in (one, other)]
        assert sorted(lines[0]) == sorted(lines[1])
    programs = sorted(path.name for path in (one / "checkpoints").iterdir())
    assert programs == sorted(path.name for path in (other / "checkpoints").iterdir())
    for number in programs:
        a, b = latest(one, number), latest(other, number)
        assert a.iteration == b.iteration
        assert a.arrays.keys() == b.arrays.keys()
        for name, array in a.arrays.items():
            np.testing.assert_array_equal(array, b.arrays[name], err_msg=name, strict=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with checkpoints of iterations 9 and 11."""
    path = tmp_path_factory.mktemp("checkpoint") / "run"
    assert train(path, 11, "--metrics-rows", "3") == 0
    return path


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "a run")


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ("--env Pendulum-v1 --normalize-observations --normalize-rewards", 32),
        ("--env FrozenLake-misc --reset-mode fresh --target-kl 0.001", 32),
        ("--num-seeds 3 --sweep learning_rate=1e-3,1e-2 --runs-per-block 2", 32),
        ("--num-seeds 2 --sweep num_envs=2,4 --keep 1", 64),
        ("--shard environments --num-envs 8 --num-minibatches 1", 128),
        ("--desired-kl 0.01 --minibatches sequences --checkpoint-iterations 100", 32),
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


def test_a_sweep_that_is_interrupted_while_it_is_extended(tmp_path, monkeypatch, two_programs):
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
    assert_same(halves, two_programs)


def test_a_sweep_whose_first_program_lost_its_last_checkpoint(tmp_path, two_programs):
    """Its rows after the one before go, though the second program's came later."""
    path = shutil.copytree(two_programs, tmp_path / "run")
    shutil.rmtree(path / "checkpoints" / "0" / "32")
    assert latest(path, 0).iteration == 30
    assert resume(path) == 0
    assert_same(path, two_programs)


def test_what_was_said_once_is_said_again(tmp_path, capsys):
    path = tmp_path / "run"
    assert train(path, 4, "--anneal-clip-eps") == 0
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


def test_evaluations_may_be_compiled_with_another_effort(tmp_path, monkeypatch):
    assert train(tmp_path / "run", 2) == 0
    monkeypatch.setattr(program, "suits_quick", lambda *_: False)
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


def test_more_or_fewer_devices_share_the_environments(tmp_path):
    """Saved as by one device; eight are told that the sums are in another order."""
    options = ["--num-envs", "8", "--num-minibatches", "1", "--normalize-rewards"]
    one, eight = tmp_path / "one", tmp_path / "eight"
    assert train(one, 3, *options, batch=128) == 0
    assert train(eight, 3, *options, "--shard", "environments", batch=128) == 0
    saved, shared = latest(one), latest(eight)
    for name, array in saved.arrays.items():
        assert shared.arrays[name].shape == array.shape
    assert resume(one, "--total-timesteps|768", "--shard|environments") == 0
    assert resume(eight, "--total-timesteps|768", "--shard|runs") == 0
    assert latest(one).iteration == latest(eight).iteration == 6


@pytest.mark.parametrize("arguments", [["--runs-per-block", "3"], ["--shard", "environments"]])
def test_what_is_not_bit_for_bit_is_said(tmp_path, capsys, arguments):
    options = ["--num-envs", "8", "--num-minibatches", "1", "--num-seeds", "2"]
    assert train(tmp_path / "run", 2, *options, batch=128) == 0
    assert resume(tmp_path / "run", "--total-timesteps|512", *arguments) == 0
    assert "not bit for bit: " in capsys.readouterr().out


def test_another_effort_is_said(tmp_path, capsys):
    path = tmp_path / "run"
    assert train(path, 2, "--eval-episodes", "0", "--eval-every", "none") == 0
    assert "quickly" in capsys.readouterr().out
    assert latest(path).facts["effort"] == "quick"
    assert resume(path, f"--total-timesteps|{4 * PER_ITERATION}") == 0
    assert "not bit for bit" not in capsys.readouterr().out
    steps = f"--total-timesteps|{6 * PER_ITERATION}"
    assert resume(path, steps, "--compile-effort|full") == 0
    shown = capsys.readouterr().out
    assert "not bit for bit: effort quick -> full" in " ".join(shown.split())
    assert "quickly" not in shown


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


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


# --- what goes wrong ---


def start(run_dir, *arguments, steps="1e9", **popen_options):
    """A long training in a process of its own."""
    command = [sys.executable, "-m", "purejaxppo.run", *SMALL.split(), "--total-timesteps", steps]
    return popen([*command, "--run-dir", str(run_dir), *arguments], **popen_options)


def start_resumed(run_dir, *arguments):
    return popen([sys.executable, "-m", "purejaxppo.run", "--resume", str(run_dir), *arguments])


def popen(command, stdout=subprocess.PIPE):
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.002)


def has_rows(run_dir, count=3):
    table = run_dir / "metrics.csv"
    return lambda: table.exists() and table.read_bytes().count(b"\n") > count


MODULE = """
import dataclasses
import jax.numpy as jnp
from purejaxppo.spaces import Box, Discrete
from purejaxppo.types import TimeStep

@dataclasses.dataclass  # which cannot be hashed
class MyEnv:
    action_space = Discrete(2)
    observation_space = Box(0.0, 1.0, (1,))
    max_episode_steps = 5
    may_truncate = False

    def reset(self, key):
        return (key, jnp.zeros(2, jnp.bfloat16), jnp.zeros((0, 3))), jnp.zeros(1)

    def step(self, key, state, action):
        done = jnp.zeros((), bool)
        return state, TimeStep(jnp.ones(1), action.astype(jnp.float32), done, done)
"""


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


@pytest.fixture
def closing():
    """Sets what becomes of SIGHUP, which else depends on who started the tests."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda action: signal.signal(signal.SIGHUP, action)
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_ignored_where_it_was(closing):
    """As under nohup."""
    closing(signal.SIG_IGN)
    with machine.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        assert not interrupt.check()
    closing(signal.SIG_DFL)
    with machine.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        assert interrupt.check()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path, number, closing):
    closing(signal.SIG_DFL)
    path, whole = tmp_path / "stopped here", tmp_path / "whole"
    options = [*STEADY.split()[:1], "--eval-every", "96000", "--eval-episodes", "2"]
    options += ["--metrics-rows", "7"]  # rows are means over many iterations
    process = start(path, *options, "--num-seeds", "2", steps="4e5")
    wait_for(has_rows(path, 1), process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert ("stops after what is being compiled, trained or evaluated" in err) == (
        number == signal.SIGINT
    )
    assert "interrupted after" in out
    assert f"to go on: python -m purejaxppo.run --resume '{path}'" in out
    assert 0 < latest(path).iteration < 12500
    summary = json.loads((path / "summary.json").read_text())
    assert summary["interrupted"]
    assert int(rows(path / "metrics.csv")[-1]["env_steps"]) == summary["env_steps"] > 0
    resumed = start_resumed(path)
    _, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    never = start(whole, *options, "--num-seeds", "2", steps="4e5")
    _, err = never.communicate(timeout=120)
    assert never.returncode == 0, err
    assert_same(path, whole)
    assert (path / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert not json.loads((path / "summary.json").read_text())["interrupted"]


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_a_training_outlives_who_reads_what_it_says(tmp_path, make):
    """As before `| head -1`, or on a terminal that is gone."""
    ours, theirs = make()
    process = start(tmp_path / "run", steps="1e5", stdout=theirs)
    os.close(theirs)
    assert b"environ" in os.read(ours, 11)
    os.close(ours)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert latest(tmp_path / "run").iteration == 3125
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] == 100_000


def test_ctrl_c_is_heard_while_an_evaluation_runs(tmp_path, monkeypatch):
    """Though Python's main thread waits for XLA, and a second one ends that."""
    (tmp_path / "endless.py").write_text(MODULE.replace("_steps = 5", "_steps = 10**9"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = start(tmp_path / "run", "--env", "endless:MyEnv", "--eval-every", "32", steps="64")
    wait_for(has_rows(tmp_path / "run", 1), process)
    time.sleep(0.2)  # rows are written just before it begins
    process.send_signal(signal.SIGINT)
    heard = []
    while "once more: at once" not in "".join(heard):
        heard.append(process.stderr.readline())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_interrupted_while_it_reports(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    path = tmp_path / "run"
    monkeypatch.setattr(host, "write_reports", interrupted)
    assert train(path, 4) == 130
    assert f"to go on: python -m purejaxppo.run --resume {path}" in capsys.readouterr().out
    monkeypatch.undo()
    assert resume(path) == 0
    assert read_summary(path)["env_steps"] == 4 * PER_ITERATION


def test_interrupted_while_compiling(tmp_path, monkeypatch, capsys):
    path, whole = tmp_path / "stopped", tmp_path / "whole"
    compiled = loop.Training._compile

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        compiled(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_compile", interrupted)
        assert train(path, 4) == 128 + signal.SIGTERM
    assert f"to go on: python -m purejaxppo.run --resume {path}" in capsys.readouterr().out
    assert not rows(path / "metrics.csv")
    assert resume(path) == 0
    assert train(whole, 4) == 0
    assert_same(path, whole)


def test_killed_twenty_times_and_yet_the_same(tmp_path):
    """SIGKILL at random moments, half of them inside a save."""
    path, whole = tmp_path / "killed", tmp_path / "whole"
    options = [
        "--no-anneal-learning-rate",
        "--checkpoint-iterations",
        "100",
        "--eval-episodes",
        "0",
    ]
    options += ["--metrics-rows", "0", "--compile-effort", "full"]  # however many steps are left
    rng, inside, reached = random.Random(0), 0, 0
    saved = path / "checkpoints" / "0"
    process = start(path, *options)
    for i in range(20):
        before = reached
        wait_for(lambda: max(checkpoint.iterations(saved), default=0) > before, process)  # noqa: B023
        if i % 2:
            wait_for(lambda: any(saved.glob("*tmp*")), process)
        else:
            time.sleep(rng.random() / 4)
        process.kill()
        process.communicate()
        inside += any(saved.glob("*tmp*"))
        reached = max(checkpoint.iterations(saved))
        if i < 19:
            process = start_resumed(path)
    assert inside >= 5
    steps = str((reached + 150) * PER_ITERATION)
    for process in (
        start_resumed(path, "--total-timesteps", steps),
        start(whole, *options, steps=steps),
    ):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert not any(saved.glob("*tmp*"))
    assert_same(path, whole)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 16
    path.write_bytes(bytes(content))


def refused(capsys, *arguments):
    """The error of a command line that is refused."""
    capsys.readouterr()
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert "compiled" not in out
    assert err.startswith("purejaxppo: error: ")
    assert err.count("\n") == 1
    return err


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


def test_two_processes_in_one_directory(copied, capsys):
    with rundir.lock(copied):
        assert "another process is training here" in refused(capsys, "--resume", copied)
    process = start(copied.parent / "new")
    wait_for(has_rows(copied.parent / "new"), process)
    assert "another process" in refused(capsys, "--resume", copied.parent / "new")
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
    options = ["--no-anneal-learning-rate", "--checkpoint-iterations", "100", "--eval-every", "0"]
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


# --- what is taken away ---


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two settings of two seeds, after eight iterations."""
    path = tmp_path_factory.mktemp("checkpoint") / "sweep"
    sweep = ["--sweep", "learning_rate=1e-3,1e-2", "--num-seeds", "2", "--runs-per-block", "4"]
    assert train(path, 8, *sweep, "--normalize-observations") == 0
    return path


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


def test_videos_during_a_training(tmp_path, capsys):
    path = tmp_path / "run"
    assert train(path, 5, "--video-every", str(2 * PER_ITERATION)) == 0
    names = sorted(file.name for file in (path / "videos").iterdir())
    assert names == [f"run0-{PER_ITERATION * i:012d}.gif" for i in (2, 4, 5)]
    capsys.readouterr()
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
