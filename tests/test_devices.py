"""A run whose environments are divided among devices, and runs divided among processes."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest
from probes import Poisoned
from trainings import UNEVALUATED, quickly

from purejaxppo import checkpoint, processes
from purejaxppo.config import Config, Hyper, RunOptions, Settings
from purejaxppo.envs.base import Vectorized
from purejaxppo.machine import Memory, num_cores
from purejaxppo.plan import Plan
from purejaxppo.program import Program
from purejaxppo.sweep import Run, make_settings_of
from purejaxppo.train import Trainer, make_setup, stack_hypers
from purejaxppo.values import ConfigError

# One minibatch of all samples: those of a device are shuffled among themselves.
CONFIG = Config(
    num_envs=8,
    num_steps=16,
    num_minibatches=1,
    torso_layers=(8,),
    normalize_observations=True,
    normalize_rewards=True,
    total_timesteps=2 * 128,
)
HYPER = Hyper(learning_rate=0.01)


def make_trainer(shards, config=CONFIG, num_runs=1, block=1):
    env = Poisoned(poison="obs")  # so devices have different numbers of valid steps
    share = dataclasses.replace(config, num_envs=config.num_envs // shards)
    plan = Plan(num_runs=num_runs, num_devices=1, block=block, shards=shards)
    return Trainer(make_setup(share, env), plan, Vectorized(env, 8 // shards))


def begin(trainer, config=CONFIG, hyper=HYPER):
    """What a chunk of two iterations is called with."""
    num_runs = trainer.plan.num_runs
    hypers = trainer.shard(stack_hypers([hyper] * num_runs))
    states = trainer.init(trainer.shard(np.arange(num_runs, dtype=np.uint32)), hypers, ())
    return states, hypers, (np.int32(2), np.float32(config.iterations))


def train(shards, config=CONFIG, hyper=HYPER, num_runs=1, block=1, evaluated=True):
    """What two iterations learned, their metrics, and an evaluation of 8 episodes if asked for."""
    trainer = make_trainer(shards, config, num_runs, block)
    states, hypers, shared = begin(trainer, config, hyper)
    states, metrics = trainer.chunk(states, hypers, shared)
    episodes = trainer.evaluate(states, hypers, ()) if evaluated else None
    learned = trainer.fetch((states.params, states.obs_stats, states.return_stats.moments))
    return learned, trainer.fetch(metrics), trainer.fetch(episodes)


def own(tree, device):
    """Of the arrays [R, D, ...] those of a device."""
    return jax.tree.map(lambda x: x[:, device], tree)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quickly():
        yield


@pytest.fixture(scope="module")
def alone():
    return train(shards=1)


@pytest.fixture(scope="module", params=[2, 8])
def divided(request):
    return train(shards=request.param)


@pytest.mark.on_cpus
def test_devices_agree_bit_for_bit(divided):
    learned, metrics, _ = divided
    for device in range(1, metrics.episodes.shape[1]):
        chex.assert_trees_all_equal(own(learned, 0), own(learned, device))


@pytest.mark.on_cpus
def test_dividing_environments_changes_rounding_only(alone, divided):
    learned, metrics, episodes = divided
    expected, expected_metrics, expected_episodes = alone
    chex.assert_trees_all_close(own(learned, 0), expected, rtol=1e-4, atol=1e-6)
    score = episodes.score.reshape(1, -1)
    np.testing.assert_allclose(score, expected_episodes.score, rtol=1e-4)
    np.testing.assert_array_equal(
        metrics.episodes[:, :, :2].sum(axis=1), expected_metrics.episodes[:, :2]
    )
    for name in (
        "approx_kl",
        "entropy",
        "grad_norm",
        "value_mean",
        "explained_variance",
    ):  # of all devices
        np.testing.assert_allclose(
            getattr(metrics, name)[:, 0, :2],
            getattr(expected_metrics, name)[:, :2],
            rtol=1e-3,
            atol=1e-6,
        )


@pytest.mark.on_cpus
def test_an_update_sends_its_gradient_alone():
    """Between the devices of a CPU each array takes 50 us, however small it is."""
    config = dataclasses.replace(CONFIG, num_minibatches=4)
    trainer = make_trainer(2, config)
    states, *others = begin(trainer, config)
    size = sum(x[0, 0].size for x in jax.tree.leaves(states.params))
    text = trainer.chunk.lower(states, *others).compile().as_text()
    sent = re.findall(r"= (.+) all-reduce\(.*op_name=\"(.+?)\"", text)
    loops = [name.count("while/body") for _, name in sent]
    assert max(loops) == 3  # of iterations, epochs and minibatches
    assert [shape for (shape, _), n in zip(sent, loops, strict=True) if n == 3] == [
        f"f32[{size}]{{0}}"
    ]


@pytest.mark.on_cpus
def test_accelerators_divide_environments_alike(monkeypatch):
    """With their branches, which a CPU can take too."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    learned, metrics, episodes = train(shards=2)
    expected, expected_metrics, expected_episodes = train(shards=1)
    chex.assert_trees_all_close(own(learned, 0), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(episodes.score.reshape(1, -1), expected_episodes.score, rtol=1e-4)
    for name in ("approx_kl", "grad_norm", "value_loss"):
        found, wanted = getattr(metrics, name)[:, 0, :2], getattr(expected_metrics, name)[:, :2]
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.on_cpus
def test_a_memory_is_divided_with_its_environments():
    config = dataclasses.replace(CONFIG, gru_units=4)
    learned, _, episodes = train(2, config)
    expected, _, expected_episodes = train(1, config)
    chex.assert_trees_all_close(own(learned, 0), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(episodes.score.reshape(1, -1), expected_episodes.score, rtol=1e-4)


@pytest.mark.on_cpus
def test_every_device_has_environments_of_its_own(divided):
    _, metrics, episodes = divided
    assert not np.array_equal(episodes.score[:, 0], episodes.score[:, 1])
    assert not np.array_equal(metrics.episode_return[:, 0], metrics.episode_return[:, 1])


@pytest.mark.on_cpus
@pytest.mark.parametrize("options", [{}, {"gru_units": 4}])
def test_every_device_stops_at_the_same_update(options):
    config = dataclasses.replace(CONFIG, num_minibatches=4, **options)
    hyper = HYPER.replace(target_kl=1e-3, learning_rate=1e-3)
    learned, metrics, _ = train(2, config, hyper, num_runs=2, evaluated=False)
    assert np.all(metrics.approx_kl[:, :, 0] > 0)
    chex.assert_trees_all_equal(own(learned, 0), own(learned, 1))
    np.testing.assert_array_equal(metrics.approx_kl[:, 0], metrics.approx_kl[:, 1])


@pytest.mark.on_cpus
def test_environments_are_divided_in_a_block_of_runs_too():
    together, _, _ = train(2, num_runs=2, block=2, evaluated=False)
    one_by_one, _, _ = train(2, num_runs=2, evaluated=False)
    chex.assert_trees_all_equal(own(together, 0), own(together, 1))
    chex.assert_trees_all_close(together, one_by_one, rtol=1e-4, atol=1e-6)


@pytest.mark.on_cpus
def test_advantages_are_of_all_devices_that_share_a_run():
    """A device's share of a minibatch may be one sample, which has no advantage over itself."""
    config = dataclasses.replace(CONFIG, env="CartPole-v1", num_steps=1)
    options = RunOptions(shard="environments", eval_episodes=0)
    (setting,) = make_settings_of(Settings(options, config, HYPER))
    program = Program(options, [Run(0, 0, setting)], Memory(2**40, per_device=False))
    assert program.trainer.setup.config.batch_size == 1


PROCESS = """
import sys
from purejaxppo import cli
sys.exit(cli.train_command(sys.argv[1:]))
"""
SWEEP = (
    "--env CartPole-v1 --total-timesteps 256 --num-envs 2 --num-steps 16 --torso-layers 8 --num-seeds 3 "
    "--sweep learning_rate=1e-3,1e30 --runs-per-block 1 --eval-episodes 4 --eval-every 128"
)


THREADS = """
import os, sys
from pathlib import Path
from purejaxppo import cli
assert cli.train_command(sys.argv[1:]) == 0
assert os.environ.get("PJRT_NPROC") == os.environ.get("ASKED")
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(sum(name.startswith("tf_XLAEigen") for name in names))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize(("asked", "threads"), [(None, 1), ("3", 3)])
def test_a_small_run_has_one_thread_unless_more_are_asked_for(tmp_path, asked, threads):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment |= {"PJRT_NPROC": asked, "ASKED": asked} if asked else {}
    run = [sys.executable, "-c", THREADS, "--env", "CartPole-v1", "--total-timesteps", "256"]
    options = ["--num-envs", "2", "--num-steps", "16", "--eval-episodes", "0", "--keep", "0"]
    done = subprocess.run(
        [*run, *options, "--eval-every", "none", "--run-dir", str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.split()[-1]) == threads


def test_devices_that_are_not_there_are_one_line():
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, "--env", "CartPole-v1"],
        env=os.environ | {"JAX_PLATFORMS": "abacus"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "error: JAX_PLATFORMS=abacus: Unable to initialize backend" in done.stderr
    assert "the extras cuda12, cuda13 and tpu" in done.stderr


def start(devices, *arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(*arguments, own=((), ())):
    """Processes of two devices each that work together, each with arguments of its own."""
    address = free_address()
    distributed = ["--distributed", "--coordinator", address, "--num-processes", "2", *arguments]
    return [start(2, *distributed, "--process-id", i, *own[i]) for i in range(2)]


def free_address():
    """Where a process 0 may be found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def directories(*paths):
    """The argument of each process for where it may write."""
    return [["--run-dir", path] for path in paths]


def finish(*processes):
    """What each wrote to its standard output."""
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        outputs.append(out)
    return outputs


def test_a_signal_to_one_process_stops_both(tmp_path):
    long = [*SWEEP.split(), *UNEVALUATED, "--total-timesteps", "1e8", "--metrics-rows", "0"]
    processes = start_two(*long, own=directories(tmp_path / "of0", tmp_path / "of1"))
    metrics = tmp_path / "of0" / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 143, err
    assert json.loads((tmp_path / "of0" / "summary.json").read_text())["interrupted"]


def test_two_processes_of_two_devices_are_one_of_four(tmp_path):
    """Six runs on four devices: the same tables and checkpoints, to the last bit, written once.

    And the same again when both go on, the latter on two devices of one process. Half of the runs diverged.
    """
    pair, single = tmp_path / "of0", tmp_path / "single"
    processes = start_two(*SWEEP.split(), own=directories(pair, tmp_path / "of1"))
    for process, out in zip(processes, finish(*processes), strict=True):
        assert ("6 runs" in out or "runs         6" in out) == (process is processes[0])
    assert not (tmp_path / "of1").exists()
    finish(start(4, *SWEEP.split(), "--run-dir", single))
    assert_same(pair, single)
    device = json.loads((pair / "summary.json").read_text())["device"]
    assert "cpu" in device
    more = ["--total-timesteps", "384"]
    finish(*start_two("--resume", pair, *more))
    (shown,) = finish(start(2, "--resume", single, *more))
    assert "not bit for bit" not in shown
    assert_same(pair, single)


def test_an_error_in_one_process_ends_both(tmp_path, monkeypatch):
    """At once: JAX would wait five minutes for the one that failed, and then abort all of them."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom purejaxppo.envs.gymnax import make\n"
        "def Mine():\n"
        "    if '1' == sys.argv[sys.argv.index('--process-id') + 1]:\n"
        "        raise OSError('nothing here')\n"
        "    return make('CartPole-v1', {})\n"
    )
    begun = time.monotonic()
    processes = start_two("--env", "mine:Mine", own=directories(tmp_path / "0", tmp_path / "1"))
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "purejaxppo: error: nothing here" in errors[1]
    assert time.monotonic() - begun < 60


def test_processes_of_unequal_devices_are_refused(tmp_path):
    address = free_address()
    options = ["--env", "CartPole-v1", "--distributed", "--coordinator", address]
    options += ["--num-processes", "2", "--run-dir", tmp_path / "run", "--process-id"]
    for process in [start(2, *options, 0), start(1, *options, 1)]:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "the processes have 2, 1 devices, and must have equally many" in err


def test_an_address_where_there_is_somebody_else_or_nobody(monkeypatch):
    """JAX would end the training whose address it is, or abort."""
    monkeypatch.setattr(processes, "_PATIENCE", 0)
    run = RunOptions(distributed=True, coordinator=free_address(), num_processes=2, process_id=1)
    with pytest.raises(ConfigError, match=f"--coordinator {run.coordinator}: .*refused"):
        processes.join(run)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = dataclasses.replace(run, coordinator=f"127.0.0.1:{port}", process_id=0)
        with pytest.raises(ConfigError, match=f"--coordinator: port {port}: .*in use"):
            processes.join(run)
    run = RunOptions(distributed=True)
    with pytest.raises(ConfigError, match="give --coordinator, --num-processes and --process-id"):
        processes.join(run)


def test_processes_with_different_options_say_which(tmp_path):
    processes = start_two(
        *("--run-dir", tmp_path / "run"), own=[("--seed", 1), ("--env", "Acrobot-v1", "--seed", 2)]
    )
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert re.search("the processes have different --env, .*--seed", err)
    assert not (tmp_path / "run").exists()


def test_processes_that_go_on_from_different_checkpoints_say_so(trained, tmp_path):
    """As from a copy that a machine has of its own."""
    here, there = (shutil.copytree(trained, tmp_path / name) for name in ("here", "there"))
    shutil.rmtree(there / "checkpoints" / "0" / "11")
    own = [("--resume", path) for path in (here, there)]
    for process in start_two("--total-timesteps", "512", own=own):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "the processes have different --resume" in err


@pytest.mark.skipif(num_cores() == 1, reason="needs two cores")
def test_processes_with_different_numbers_of_cores_say_what_to_give(tmp_path):
    large = ["--num-envs", "64", "--num-steps", "128", "--num-minibatches", "1"]
    pair = start_two(*large, "--run-dir", tmp_path / "run")
    os.sched_setaffinity(pair[1].pid, list(os.sched_getaffinity(0))[:1])
    for process in pair:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "the processes have different --microbatch-size" in err
    assert not (tmp_path / "run").exists()


def assert_same(pair, single):
    for name in ("metrics.csv", "evaluation.csv", "sweep.csv"):
        assert (pair / name).read_text() == (single / name).read_text()
    one, other = (checkpoint.load(path / "checkpoints" / "0") for path in (pair, single))
    chex.assert_trees_all_equal(one.arrays, other.arrays)
    assert one.iteration == other.iteration
