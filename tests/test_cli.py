"""The command line, as a user types it: what it leaves behind, and what it says of mistakes."""

import dataclasses
import io
import json
import os
import queue
import re
import signal
import subprocess
import sys
import weakref

import jax
import numpy as np
import probes
import pytest
import trainings
import yaml
from trainings import SMALL, UNEVALUATED, rows

import purejaxppo
from purejaxppo import cli, envs, host, machine, program, report, run
from purejaxppo.display import Display
from purejaxppo.envs import load_settings
from purejaxppo.loggers import EVALUATION_COLUMNS, METRICS_COLUMNS, MetricsTable
from purejaxppo.loop import Training
from purejaxppo.machine import Memory
from purejaxppo.plan import Plan, make_footprint
from purejaxppo.program import Program
from purejaxppo.sweep import make_runs, make_settings_of
from purejaxppo.types import TimeStep
from purejaxppo.values import ConfigError


def train(*arguments):
    return trainings.run(*SMALL.split(), *arguments, pictures=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of two runs of 11 iterations, evaluated after 5, 10 and at the end."""
    path = tmp_path_factory.mktemp("cli") / "run"
    status = train(
        "--env", "CartPole-v1", "--total-timesteps", "3.4e2", "--num-seeds", "2", "--seed", "5",
        "--eval-every", "160", "--eval-episodes", "3", "--run-dir", str(path),
        "--metrics-rows", "4",
    )  # fmt: skip
    assert status == 0
    return path


def test_files_of_a_run(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.yaml", "metrics.csv", "evaluation.csv", "summary.json", "learning_curve.png",
        "checkpoints", ".lock",
    }  # fmt: skip
    assert (finished / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_metrics(finished):
    table = rows(finished / "metrics.csv")
    assert list(table[0]) == METRICS_COLUMNS
    assert METRICS_COLUMNS[:16] == [
        "run",
        "seed",
        "iteration",
        "env_steps",
        "episode_return",
        "episode_length",
        "episodes",
        "value_mean",
        "policy_loss",
        "value_loss",
        "entropy",
        "approx_kl",
        "clip_fraction",
        "explained_variance",
        "grad_norm",
        "learning_rate",
    ]
    # 11 iterations in at most 4 rows a run: intervals of 3, the last one shorter.
    assert [row["iteration"] for row in table if row["run"] == "0"] == ["3", "6", "9", "11"]
    assert [row["seed"] for row in table[:2]] == ["5", "6"]
    assert [int(row["env_steps"]) for row in table[::2]] == [96, 192, 288, 352]
    rates = [float(row["learning_rate"]) for row in table[::2]]
    full = load_settings("CartPole-v1").hyper.learning_rate
    expected = [full * np.mean([1 - i / 11 for i in part]) for part in ([0, 1, 2], [9, 10])]
    np.testing.assert_allclose([rates[0], rates[3]], expected, rtol=1e-5)
    for row in table:
        assert (row["episode_return"] == "") == (row["episodes"] == "0")


def test_evaluations(finished):
    table = rows(finished / "evaluation.csv")
    assert list(table[0]) == EVALUATION_COLUMNS
    assert [(row["run"], row["iteration"]) for row in table] == [
        ("0", "5"), ("1", "5"), ("0", "10"), ("1", "10"), ("0", "11"), ("1", "11"),
    ]  # fmt: skip
    assert {row["episodes"] for row in table} == {"3"}


def test_summary(finished):
    summary = json.loads((finished / "summary.json").read_text())
    last = [float(row["return_mean"]) for row in rows(finished / "evaluation.csv")[-2:]]
    evaluation = summary["evaluation"]
    np.testing.assert_allclose(evaluation["return_per_run"], last, rtol=1e-6)
    np.testing.assert_allclose(evaluation["return_mean"], np.mean(last), rtol=1e-6)
    assert summary["env_steps"] == 352
    assert summary["diverged_runs"] == []
    assert summary["versions"]["jax"] == jax.__version__
    for name in ("steps_per_second", "compile_seconds", "wall_seconds"):
        assert summary[name] > 0


def test_config_runs_again_to_the_same_result(finished, tmp_path, monkeypatch):
    """In a directory of its own, although that one was named."""
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert (config["env"], config["seed"], config["total_timesteps"]) == ("CartPole-v1", 5, 340)
    assert config["runs_per_block"] == "auto"
    assert cli.train_command(["--config", str(finished / "config.yaml")]) == 0
    (again,) = (tmp_path / "runs").iterdir()
    for name in ("metrics.csv", "evaluation.csv"):
        assert (again / name).read_text() == (finished / name).read_text()


def test_directory_in_use_is_left_alone(finished, capsys):
    before = (finished / "summary.json").read_bytes()
    assert train("--run-dir", str(finished)) == 2
    assert "in use" in capsys.readouterr().err
    assert (finished / "summary.json").read_bytes() == before


def test_header_and_results(tmp_path, capsys):
    status = cli.train_command([
        *SMALL.split(), "--env", "FrozenLake-misc", "--total-timesteps", "33", "--eval-episodes", "2",
        "--run-dir", str(tmp_path / "run"), "--no-normalize-observations",
    ])  # fmt: skip
    shown = capsys.readouterr().out
    assert status == 0
    assert "FrozenLake-misc: Discrete(16) -> Discrete(4)" in shown
    assert "64 in 2 iterations of 2 environments x 16 steps, up from 33" in shown
    assert "compiled in" in shown
    assert "evaluation, 2 episodes a run" in shown
    assert f"written to {tmp_path / 'run'}" in shown


def test_sweep(tmp_path, capsys):
    """Two programs of two settings and two seeds; one setting cannot but diverge."""
    path = tmp_path / "run"
    status = train(
        "--env", "Pendulum-v1", "--total-timesteps", "64", "--num-seeds", "2", "--seed", "3",
        "--sweep", "learning_rate=1e3,1e-3", "--sweep", "num_envs=2,4",
        "--eval-episodes", "2", "--run-dir", str(path),
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert status == 0
    assert "learning_rate=1e3,1e-3 num_envs=2,4: 4 settings" in shown
    assert "program 2 of 2: num_envs=4: 4 runs" in shown
    assert "diverged: run 1, learning_rate=1000, num_envs=2, seed 4" in shown

    table = rows(path / "sweep.csv")
    assert [(row["run"], row["setting"], row["seed"]) for row in table] == [
        (str(run), str(run // 2), str(3 + run % 2)) for run in range(8)
    ]
    assert [row["sweep.learning_rate"] for row in table] == ["1000"] * 4 + ["0.001"] * 4
    assert [row["diverged"] for row in table] == ["True"] * 4 + ["False"] * 4
    assert [row["env_steps"] for row in table] == ["64"] * 8
    assert [row["final_return"] == "" for row in table] == [True] * 4 + [False] * 4

    summary = json.loads((path / "summary.json").read_text())
    assert summary["diverged_runs"] == [0, 1, 2, 3]
    best, *others = summary["settings"]
    final = [float(row["final_return"]) for row in table if int(row["run"]) in best["runs"]]
    np.testing.assert_allclose(best["iqm"], np.mean(final), rtol=1e-6)
    assert best["swept"]["learning_rate"] == 1e-3
    assert [other["diverged"] for other in others] == [0, 2, 2]
    for name in ("sweep.png", "learning_curve.png"):
        assert (path / name).read_bytes().startswith(b"\x89PNG")

    # The best setting trains as it is, to what its runs reached in the sweep.
    again = tmp_path / "again"
    arguments = ["--config", str(path / "best.yaml"), "--run-dir", str(again)]
    assert cli.train_command(arguments) == 0
    config = yaml.safe_load((again / "config.yaml").read_text())
    assert (config["sweep"], config["learning_rate"]) == ([], 1e-3)
    assert config["num_envs"] == best["swept"]["num_envs"]
    returns = json.loads((again / "summary.json").read_text())["evaluation"]["return_per_run"]
    np.testing.assert_allclose(returns, final, rtol=1e-6)


def test_rows_are_written_while_the_next_chunk_is_started(tmp_path, monkeypatch):
    """A GPU's program blocks who starts it until it is done."""
    written, started = queue.Queue(), []
    compile_training, add = Training._compile, MetricsTable.add

    def compile_program(self):
        def blocking(*arguments):
            if started:
                written.get(timeout=60)  # the rows of the one before
            started.append(arguments)
            return chunk(*arguments)

        compile_training(self)
        chunk, self._chunk = self._chunk, blocking

    def write(self, metrics):
        add(self, metrics)
        written.put(None)

    monkeypatch.setattr(Training, "_compile", compile_program)
    monkeypatch.setattr(MetricsTable, "add", write)
    status = train(
        "--env", "CartPole-v1", "--total-timesteps", "320", "--eval-episodes", "0",
        "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert status == 0
    assert len(started) > 2


def test_a_sweep_lets_go_of_its_programs(tmp_path, monkeypatch):
    """A process in which there are more than some seventy is aborted."""
    monkeypatch.setattr(trainings, "_load", trainings._load.__wrapped__)  # or it keeps them
    compiled, alive = [], []

    def compile_program(self):
        alive.append(sum(program() is not None for program in compiled))
        compile_training(self)
        compiled.extend(weakref.ref(x) for x in (self.program.trainer, self._chunk))

    compile_training = Training._compile
    monkeypatch.setattr(Training, "_compile", compile_program)
    status = train(
        "--env", "CartPole-v1", "--total-timesteps", "320", "--sweep", "num_envs=2,4",
        "--eval-episodes", "0", "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert status == 0
    assert alive == [0, 0]


@pytest.mark.on_cpus
def test_environments_divided_among_devices(tmp_path, capsys):
    path = tmp_path / "run"
    status = train(
        "--num-envs", "16", "--total-timesteps", "1e3", "--eval-episodes", "11", "--eval-every", "0",
        "--shard", "environments", "--run-dir", str(path),
    )  # fmt: skip
    assert status == 0
    devices = len(jax.devices())
    assert f"{devices} x {machine.device_name()}, which share the" in capsys.readouterr().out
    (evaluation,) = rows(path / "evaluation.csv")
    assert evaluation["episodes"] == "11"
    table = rows(path / "metrics.csv")
    assert [int(row["env_steps"]) for row in table] == [256, 512, 768, 1024]
    # 16 steps of 16 environments fall into episodes, whichever device has them.
    assert sum(float(row["episode_length"]) * int(row["episodes"]) for row in table) > 700


def test_memory_decides_the_block(monkeypatch):
    """Eight runs of which four would be a block, with room for less and less."""
    arguments = "--num-seeds 8 --num-envs 8 --total-timesteps 128 --eval-episodes 0"
    monkeypatch.setattr(program, "make_plan", lambda _, n, block, __: Plan(n, 1, block or 4))
    settings = cli.parse([*SMALL.split(), *arguments.split()])
    runs = make_runs(make_settings_of(settings), settings.run)

    def planned(size, options=settings.run):
        return Program(options, runs, Memory(size, per_device=False))

    whole = planned(2**40)
    assert whole.plan.block == 4
    footprint = make_footprint(
        whole.trainer.setup, whole.plan, whole.shapes, whole._saved_bytes // 8
    )
    for block in (4, 2, 1):
        size = footprint.total(Plan(8, 1, block))
        smaller = planned(size)
        assert (smaller.plan.block, smaller.expected_bytes) == (block, size)
    with pytest.raises(ConfigError, match="8 runs in blocks of 1 need"):
        planned(100)
    with pytest.raises(ConfigError, match="8 runs in blocks of 4 need"):
        planned(whole.expected_bytes - 1, dataclasses.replace(settings.run, runs_per_block=4))


def test_what_is_swept_need_not_fit_before(tmp_path):
    """3 minibatches divide the samples of every setting, but not those of the default."""
    options = ["--num-minibatches", "3", "--sweep", "num_envs=3,6", "--total-timesteps", "96"]
    assert train(*options, *UNEVALUATED, "--run-dir", str(tmp_path / "run")) == 0


def test_an_interrupted_sweep_keeps_what_was_done(tmp_path, monkeypatch, capsys):
    stop = iter([signal.SIGTERM])  # once: the chunk that runs is awaited
    monkeypatch.setattr(Display, "update", lambda *_: [signal.raise_signal(s) for s in stop])
    path = tmp_path / "run"
    status = train(
        "--total-timesteps", "320", "--sweep", "num_envs=2,4", "--eval-episodes", "2",
        "--run-dir", str(path),
    )  # fmt: skip
    assert status == 143
    assert "interrupted after 1 iterations" in capsys.readouterr().out
    assert [row["run"] for row in rows(path / "metrics.csv")] == ["0"]
    assert [row["env_steps"] for row in rows(path / "sweep.csv")] == ["32", "0"]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["diverged_runs"] == []


def test_no_evaluation(tmp_path):
    path = tmp_path / "run"
    assert train("--total-timesteps", "32", "--eval-episodes", "0", "--run-dir", str(path)) == 0
    assert rows(path / "evaluation.csv") == []
    assert json.loads((path / "summary.json").read_text())["evaluation"]["return_mean"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lerning-rate 3", "unknown option --lerning-rate; did you mean --learning-rate?"),
        ("--lr 3", "unknown option --lr; did you mean --learning-rate?"),
        ("--batch-size 3", "unknown option --batch-size; did you mean --num-minibatches?"),
        ("--config a.yaml --config b.yaml", "--config a.yaml and b.yaml: only one can be given"),
        ("--num_env 3", "unknown option --num-env; did you mean --num-envs"),
        ("--env CartPol-v1", "unknown environment 'CartPol-v1'; did you mean CartPole-v1"),
        ("--env nowhere:Env", "--env nowhere:Env: No module named 'nowhere'"),
        ("--env ./mine.py:Env", "write my_module:MyEnv"),
        ("--env :Env", "write my_module:MyEnv"),
        ("--env purejaxppo:__version__", ", not a class or function that makes one"),
        ("--num-seeds 1e9", "--num-seeds 1000000000: must be in 1 ... 1000000"),
        ("--seed 4294967295 --num-seeds 2", "must be at most 2**32 - --num-seeds, 4294967294"),
        (
            "--runs-per-block 1e20",
            "--runs-per-block 100000000000000000000: must be at most 1000000",
        ),
        ("--eval-episodes 1e12", "give fewer runs, a smaller --num-envs or --eval-episodes"),
        ("--env-args tau=abc", "--env-args tau=abc: must be a number"),
        ("--env-args max_steps_in_episode=-1", "max_episode_steps is -1: must be a whole number"),
        ("--sweep resize=84x84,36x36", "--resize: the observations of CartPole-v1 are Box([4]"),
        ("--env", "--env"),
        ("--num-envs many", "--num-envs: 'many' is not a whole number"),
        ("--num-envs 1.5", "--num-envs: '1.5' is not a whole number"),
        ("--num-envs", "Missing value for argument '--num-envs'"),
        ("--learning-rate fast", "--learning-rate: could not convert"),
        ("--log-std both", "invalid choice 'both' for argument '--log-std'"),
        ("stray", "Unrecognized options: stray"),
        ("--num-envs 3 --num-steps 5", "is not divisible by --num-minibatches 2"),
        ("--num-envs 0", "--num-envs 0: must be at least 1"),
        ("--gamma 1.1", "--gamma 1.1: must be in 0 ... 1"),
        ("--desired-kl 0.01 --anneal-learning-rate", "both set the learning rate"),
        (
            "--no-anneal-learning-rate --desired-kl 0.01 --target-kl 0.02",
            "--target-kl ends an iteration before",
        ),
        ("--activation sin", "--activation sin: must be one of"),
        ("--env-args size", "--env-args: 'size' is not name=value"),
        ("--env-args size=3", "CartPole-v1 has no argument 'size'"),
        ("--env-args size=[1", "--env-args: size=[1: must be a number, a text"),
        ("--env-args size=2024-01-01", "--env-args: size=2024-01-01: must be a number, a text"),
        ("--env-args size={a:1}", "--env-args: size={a:1}: must be a number, a text"),
        ("--action-distribution gaussian", "does not fit CartPole-v1, whose actions are Discrete"),
        ("--env Pendulum-v1 --action-distribution categorical", "use gaussian or tanh_gaussian"),
        ("--env FrozenLake-misc --normalize-observations", "which is one-hot encoded"),
        ("--log-std state", "--log-std state does not fit CartPole-v1"),
        ("--convolution xla", "--convolution xla: the network for CartPole-v1 has no convolutions"),
        ("--init-log-std -1", "--init-log-std does not fit CartPole-v1"),
        ("--env Pendulum-v1 --log-std state --init-log-std 2", "lies in -20 ... 2"),
        ("--num-envs 3 --num-steps 8 --minibatches sequences", "as --minibatches sequences needs"),
        (
            "--num-envs 3 --num-steps 8 --num-minibatches 2 --gru-units 8",
            "as --gru-units 8 needs",
        ),
        ("--gru-units 0", "--gru-units 0: must be at least 1"),
        ("--gru-units 8 --minibatches samples", "--gru-units 8 needs sequences"),
        ("--gru-units 8 --recompute-advantages", "the memory of --gru-units 8 is not taken anew"),
        ("--gru-units 8 --no-shared-torso", "policy and value share the memory"),
        ("--gru-units 8 --microbatch-size 8", "--microbatch-size 8: sequences are whole"),
        ("--reward-scale 0", "--reward-scale 0.0: must be above 0"),
        ("--normalize-rewards --reward-scale 2", "--normalize-rewards scales rewards already"),
        ("--backend spring", "--backend or --env-args: CartPole-v1 has no argument 'backend'"),
        (
            "--env hopper --env-args backend=mjx",
            "backend=mjx: the backend is spring; --backend sets",
        ),
        (
            "--env hopper --sweep backend=spring,mjx",
            "--sweep backend: returns of different physics",
        ),
        ("--learning-rate 1e39", "must be finite in float32"),
        ("--clip-eps 1e-50", "--clip-eps 1e-50: must be above 0 in float32"),
        ("--env swimmer --backend mjx", "--backend mjx: brax/swimmer runs on generalized"),
        ("--env brax/antt", "unknown environment 'brax/antt'; did you mean brax/ant"),
        ("--reset-mode fresh --pool-size 3", "there is no pool with --reset-mode fresh"),
        ("--eval-every 10 --eval-episodes 0", "there are no --eval-episodes"),
        ("--resize 84", "--resize: '84' is not HEIGHT,WIDTH"),
        ("--policy-layers 64,x", "--policy-layers: 'x' is not a whole number"),
        ("--env MNISTBandit-bsuite", "downloads its data, and that failed"),
        ("--config missing.yaml", "missing.yaml: No such file or directory"),
        ("--run-dir /proc/nothing", "--run-dir /proc/nothing"),
        ("--sweep lr=1,2", "--sweep lr: no such option; did you mean learning_rate"),
        ("--sweep lerning_rate=1,2", "--sweep lerning_rate: no such option; did you mean"),
        ("--sweep gamma=0.9 --sweep ent_coef=1,-1", "--ent-coef -1.0: must be at least 0"),
        ("--sweep gamma~uniform(0,1) --samples 0", "--samples 0: must be at least 1"),
        pytest.param(
            "--memory-limit 1MiB",
            "--memory-limit 1MiB: a process has ",
            marks=pytest.mark.on_cpus,
        ),
        ("--num-envs 10000000 --memory-limit 16GiB", "or more --memory-limit"),
        ("--coordinator here --distributed --num-processes 2 --process-id 0", "must be host:port"),
        ("--memory-limit 8Gx", "--memory-limit 8Gx: must be a size such as 8GiB"),
        pytest.param(
            "--num-envs 3 --shard environments",
            "--num-envs 3 cannot be divided among 8 devices",
            marks=pytest.mark.on_cpus,
        ),
        ("--process-id 1", "--process-id: only with --distributed"),
        ("--distributed --process-id 1", "all of --coordinator, --num-processes, --process-id"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, capsys, monkeypatch, tmp_path):
    """Before anything compiles."""
    monkeypatch.setattr(Training, "_compile", None)
    if "--run-dir" not in arguments:
        arguments += f" --run-dir {tmp_path / 'run'}"
    assert train(*arguments.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.startswith("purejaxppo: error: ")
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_squashing_needs_bounds(monkeypatch):
    unbounded = envs.make("Pendulum-v1")
    unbounded.action_space = type(unbounded.action_space)(-np.inf, np.inf, (1,))
    monkeypatch.setattr(envs, "make", lambda *_: unbounded)
    settings = cli.parse(["--env", "Pendulum-v1", "--action-distribution", "tanh_gaussian"])
    with pytest.raises(ConfigError, match="needs finite bounds"):
        host.train(settings)


def test_all_runs_diverged(tmp_path, capsys):
    path = tmp_path / "run"
    status = train(
        "--env", "Pendulum-v1", "--total-timesteps", "96", "--learning-rate", "1e38",
        "--max-grad-norm", "1e38", "--run-dir", str(path), "--eval-episodes", "4",
    )  # fmt: skip
    assert status == 1
    assert json.loads((path / "summary.json").read_text())["diverged_runs"] == [0]
    shown = capsys.readouterr().out
    assert "diverged: run 0, seed 0" in shown
    assert "0 │ diverged │" in shown


def test_an_unusual_environment_is_trained_and_evaluated(tmp_path, capsys):
    """In blocks, on several devices."""
    path = tmp_path / "run"
    arguments = ["--env", "probes:Unusual", "--num-seeds", "3", "--runs-per-block", "2"]
    arguments += ["--eval-every", "32", "--eval-episodes", "3", "--run-dir", str(path)]
    assert train(*arguments, "--total-timesteps", "64") == 0
    assert "in blocks of 2: 4 are computed" in capsys.readouterr().out
    assert train("--env", "probes:Unusual", "--resume", str(path), "--total-timesteps", "96") == 0
    evaluations = rows(path / "evaluation.csv")
    assert len(evaluations) == 3 * 3
    assert {(row["return_mean"], row["length_mean"]) for row in evaluations} == {("5", "5")}
    table = rows(path / "metrics.csv")
    assert {(row["invalid_steps"], row["episode_return"]) for row in table} == {("0", "5")}


def test_numbers_of_a_run_that_has_diverged_are_left_out(tmp_path):
    path = tmp_path / "run"
    arguments = ["--env", "Pendulum-v1", "--total-timesteps", "1280", "--eval-every", "640"]
    arguments += [
        "--sweep",
        "learning_rate=1e-3,1e30",
        "--eval-episodes",
        "2",
        "--metrics-rows",
        "2",
    ]
    assert train(*arguments, "--run-dir", str(path)) == 0
    good, bad = ([r for r in rows(path / "metrics.csv") if r["run"] == run] for run in "01")
    assert float(good[1]["episode_return"]) < -100
    assert (bad[1]["episodes"], bad[1]["invalid_steps"]) == ("0", "640")
    for name in ("episode_return", "value_mean", "policy_loss", "entropy", "approx_kl"):
        assert bad[1][name] == ""
        assert good[1][name] != ""
    means = [(row["run"], row["return_mean"] != "") for row in rows(path / "evaluation.csv")]
    assert sorted(means) == [("0", True), ("0", True), ("1", False), ("1", False)]


def test_so_are_those_of_one_with_discrete_actions(tmp_path):
    """Which are numbers, whatever the network says."""
    path = tmp_path / "run"
    arguments = [
        "--sweep",
        "learning_rate=1e-3,1e30",
        "--metrics-rows",
        "0",
        "--eval-episodes",
        "0",
    ]
    assert train(*arguments, "--total-timesteps", "320", "--run-dir", str(path)) == 0
    last = {row["run"]: row for row in rows(path / "metrics.csv")}
    assert last["0"]["value_mean"] != ""
    assert (last["1"]["episodes"], last["1"]["episode_return"]) == ("0", "")
    assert last["1"]["invalid_steps"] == "0"


@dataclasses.dataclass(frozen=True)
class Broken(probes.Probe):
    """Gives a reward that is no number, in every step or in every other."""

    always: bool = True

    def reset(self, key):
        return probes.ZERO(()), probes.ZERO(1)

    def step(self, key, state, action):
        reward = jax.numpy.where(self.always | (state == 1), np.nan, 1.0)
        return state + 1, TimeStep(probes.ZERO(1), reward, probes.NO(), probes.NO())


@pytest.mark.parametrize("always", [True, False])
def test_steps_that_are_invalid_are_told_of(tmp_path, capsys, always):
    """At once, and in the end where they were most: nothing has been learned."""
    envs.register("Broken", Broken)
    arguments = ["--env", "Broken", "--env-args", f"always={str(always).lower()}"]
    path = tmp_path / "run"
    assert train(*arguments, "--total-timesteps", "64", "--run-dir", str(path)) == 0
    out = capsys.readouterr().out
    of = 32 if always else 16
    assert out.count("invalid and are left out") == 1
    assert f"run 0, seed 0: {of} of 32 steps were invalid" in out
    assert ("most steps were invalid: run 0, seed 0" in out) == always
    assert json.loads((path / "summary.json").read_text())["invalid_steps"] == [2 * of]


def test_a_mistake_does_not_leave_a_directory_in_use(tmp_path, monkeypatch):
    """The next try may have the same one."""
    path = tmp_path / "run"
    path.mkdir()
    arguments = ["--total-timesteps", "32", "--eval-episodes", "0", "--run-dir", str(path)]
    with monkeypatch.context() as patch:
        patch.setattr(Program, "compile", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(*arguments)
    assert not any(path.iterdir())
    monkeypatch.setattr(host, "write_reports", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(*arguments)
    assert {"checkpoints", "metrics.csv", "config.yaml"} <= {file.name for file in path.iterdir()}


def test_a_run_that_diverges_in_its_last_update_is_named(tmp_path, monkeypatch):
    """Its losses were taken before."""
    for module in ("train", "validation"):  # which refuse inf
        monkeypatch.setattr(f"purejaxppo.{module}.validate_hyper", lambda _: None)
    path = tmp_path / "run"
    status = train(
        "--total-timesteps", "32", "--num-minibatches", "1", "--update-epochs", "1",
        "--learning-rate", "inf", "--run-dir", str(path), "--eval-episodes", "0",
    )  # fmt: skip
    assert status == 1
    assert np.isfinite(float(rows(path / "metrics.csv")[0]["policy_loss"]))
    assert json.loads((path / "summary.json").read_text())["diverged_runs"] == [0]


def test_letters_that_the_output_lacks_are_numbers(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.guarded(lambda _: print("é") or 0)([]) == 0
    assert written.getvalue() == b"\\xe9\n"


def test_nobody_reads_on(monkeypatch, capsys):
    """As after `purejaxppo envs | head -1`: no traceback, neither then nor when Python ends."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.envs_command([]) == 1
        pipe.flush()
    assert capsys.readouterr().err == ""


def test_too_little_memory_is_one_line(capsys):
    """As a device says it: a petabyte is more than any has."""
    assert cli.guarded(lambda _: jax.numpy.zeros(2**48))([]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"purejaxppo: error: Out of memory .*\d+ bytes.*: fewer runs .* \(--runs-per-block, .*\)\n",
        err,
    )


def test_help_is_grouped(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.train_command(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for text in ("run options", "config options", "hyper options", "--total-timesteps", "1e6"):
        assert text in shown


def test_values_of_our_own_types():
    settings = cli.parse(
        [
            "--total-timesteps",
            "1e6",
            "--num-envs",
            "1_024",
            "--torso-layers",
            "32,16",
            "--policy-layers=",
            "--env-args",
            "size=8",
            "kind=[1,2]",
            "--eval-every",
            "5e4",
            "--env-args",
            "deep=true",
            "--video-every=none",
            "--no-shared_torso",
        ]
    )
    assert settings.config.total_timesteps == 1_000_000
    assert settings.config.num_envs == 1_024
    assert settings.config.torso_layers == (32, 16)
    assert settings.config.policy_layers == ()
    assert settings.config.env_args == (("size", 8), ("kind", (1, 2)), ("deep", True))
    assert settings.run.eval_every == 50_000
    assert settings.run.video_every is None
    assert settings.config.shared_torso is False


def test_options_lie_over_the_tuned_ones_and_over_a_file(tmp_path):
    tuned = load_settings("CartPole-v1")
    settings = cli.parse(["--env", "CartPole-v1", "--gamma", "0.5"])
    assert settings.hyper.gamma == 0.5
    assert settings.hyper.learning_rate == tuned.hyper.learning_rate
    file = tmp_path / "c.yaml"
    file.write_text("env: Acrobot-v1\nnum_envs: 3\nlearning_rate: 1e-5\nreward_clip: 2")
    settings = cli.parse(["--config", str(file), "--num-envs", "7"])
    assert (settings.config.env, settings.config.num_envs) == ("Acrobot-v1", 7)
    assert (settings.hyper.learning_rate, settings.hyper.reward_clip) == (1e-5, 2)
    assert cli.parse(["--config", str(file), "--reward-clip", "none"]).hyper.reward_clip is None


def run_main(*arguments):
    return cli.main(list(arguments))


def test_console_script(capsys):
    assert run_main("envs") == 0
    shown = capsys.readouterr().out.split("\n")
    for line in (
        "CartPole-v1  tuned", "MNISTBandit-bsuite", "Asterix-MinAtar  tuned for its suite",
        "brax/ant  published settings", "craftax/Craftax-Symbolic-v1  published settings",
        "playground/CheetahRun",
    ):  # fmt: skip
        assert line in shown
    assert run_main("--help") == 0
    assert "train" in capsys.readouterr().out
    assert run_main("--version") == 0
    assert capsys.readouterr().out == f"purejaxppo {purejaxppo.__version__}\n"
    assert run_main() == 2
    assert run_main("trian") == 2
    assert "unknown command 'trian'; did you mean train?" in capsys.readouterr().err
    assert run_main("train", "--gamma", "2") == 2


def test_ctrl_c_before_there_is_a_command_is_no_traceback(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", interrupted)
    assert run.main(["envs"]) == 130


def test_public_names_are_imported_when_asked_for():
    code = "import sys, purejaxppo; assert 'jax' not in sys.modules; from purejaxppo import *"
    code += "; assert purejaxppo.envs.make is make and Config().num_envs; purejaxppo.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("module 'purejaxppo' has no attribute 'nothing'\n")


def test_device_error_is_not_hidden(tmp_path, monkeypatch, capsys):
    """A disk that fills up is told in one line, with status 1."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_summary", full)
    path = str(tmp_path / "run")
    assert train("--total-timesteps", "32", "--eval-episodes", "0", "--run-dir", path) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_python_m_and_one_process_less_cache(tmp_path):
    """The command of the README, with the cache off: nothing is written outside the directory."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "purejaxppo.run", *SMALL.split(), "--total-timesteps", "32"]
    command += ["--eval-episodes", "0", "--run-dir", str(tmp_path / "run")]
    off = subprocess.run([*command, "--no-compilation-cache"], env=environment, check=False)
    assert off.returncode == 0
    assert not (tmp_path / "cache" / "purejaxppo").exists()
    command[-1] = str(tmp_path / "run2")
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert any((tmp_path / "cache" / "purejaxppo").iterdir())
