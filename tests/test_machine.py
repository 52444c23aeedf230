"""What stops a training: signals, a terminal that is gone, and being killed; and what a machine is called."""

import os
import random
import signal
import time

import pytest
from trainings import (
    MODULE,
    PER_ITERATION,
    STEADY,
    UNEVALUATED,
    assert_same,
    has_rows,
    latest,
    read_summary,
    resume,
    rows,
    start,
    start_resumed,
    train,
    wait_for,
)

from purejaxppo import checkpoint, cpu, host, loop, machine
from purejaxppo.config import RunOptions


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


def test_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path, closing):
    """By Ctrl-C, and then, as it goes on, by a terminal that is closed."""
    closing(signal.SIG_DFL)
    path, whole = tmp_path / "stopped here", tmp_path / "whole"
    options = [*STEADY.split()[:1], "--eval-every", "96000", "--eval-episodes", "2"]
    options += ["--metrics-rows", "7", "--num-seeds", "2"]  # rows are means over many iterations
    process, reached, lines = start(path, *options, steps="4e5"), 0, 1
    for number in (signal.SIGINT, signal.SIGHUP):
        wait_for(has_rows(path, lines), process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert "Traceback" not in err
        assert ("stops after what is being compiled, trained or evaluated" in err) == (
            number == signal.SIGINT
        )
        assert "interrupted after" in out
        assert f"to go on: python -m purejaxppo.run --resume '{path}'" in out
        assert reached < latest(path).iteration < 12500
        reached, lines = latest(path).iteration, 1 + len(rows(path / "metrics.csv"))
        summary = read_summary(path)
        assert summary["interrupted"]
        assert int(rows(path / "metrics.csv")[-1]["env_steps"]) == summary["env_steps"] > 0
        process = start_resumed(path)
    for finished in (process, start(whole, *options, steps="4e5")):
        _, err = finished.communicate(timeout=120)
        assert finished.returncode == 0, err
    assert_same(path, whole)
    assert (path / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert not read_summary(path)["interrupted"]


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_a_training_outlives_who_reads_what_it_says(tmp_path, make):
    """As before `| head -1`, or on a terminal that is gone."""
    ours, theirs = make()
    process = start(tmp_path / "run", *UNEVALUATED, steps="1e5", stdout=theirs)
    os.close(theirs)
    assert b"environ" in os.read(ours, 11)
    os.close(ours)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert latest(tmp_path / "run").iteration == 3125
    assert read_summary(tmp_path / "run")["env_steps"] == 100_000


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


@pytest.mark.on_cpus
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("model name : A\nflags : sse avx2 avx512f\n", "A with AVX-512"),
        ("model name : A\nflags : sse avx2\n", "A"),
        ("model name : A\nFeatures : neon\n", "A"),
        ("processor : 0\n", "cpu"),
    ],
)
def test_a_cpu_is_called_by_its_model_and_its_widest_vectors(monkeypatch, said, kind):
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: said)
    assert machine.device_name() == f"{kind} (cpu)"


@pytest.mark.parametrize(("limited", "expected"), [(2**30, 2**30), (2**50, 2**40), (None, 2**40)])
def test_a_container_may_leave_less_than_the_machine(tmp_path, monkeypatch, limited, expected):
    (tmp_path / "meminfo").write_text(f"MemAvailable: {2**40 // 1024} kB\n")
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / "meminfo")
    monkeypatch.setattr(machine.cgroups, "free_memory", lambda: limited)
    assert machine._available_bytes() == expected


def test_xla_has_no_more_threads_than_a_container_has_cores(monkeypatch):
    said = []
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(machine.cgroups, "num_cores", lambda: 1)
    monkeypatch.setattr(machine, "start_devices", lambda: said.append(os.environ["PJRT_NPROC"]))
    machine.configure(RunOptions(), num_runs=8)
    assert said == ["1"]
    assert "PJRT_NPROC" not in os.environ
