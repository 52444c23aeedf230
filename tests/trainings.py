"""Small trainings by the command line, and processes of them."""

import contextlib
import csv
import functools
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from jax.experimental.serialize_executable import deserialize_and_load

from purejaxppo import checkpoint, cli, effort, executables, report

SMALL = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --torso-layers 8"


PER_ITERATION = 32


# Unlike annealing, this does not depend on how long the training is meant to be.
STEADY = "--no-anneal-learning-rate --eval-every 128 --eval-episodes 3 --checkpoint-iterations 9"
UNEVALUATED = ["--eval-every", "none", "--eval-episodes", "0"]


@functools.lru_cache(maxsize=16)
def _load(program, in_tree, out_tree, devices):
    return deserialize_and_load(program, in_tree, out_tree, execution_devices=devices)


def load(*program, execution_devices):
    return _load(*program, tuple(execution_devices))


def run(*arguments, pictures=False):
    """A command as in a process of its own: what it compiles is kept for those after it, and what it loads stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executables, "_is_ours", lambda: True)
        patch.setattr(executables, "deserialize_and_load", load)
        if not pictures:
            patch.setattr(report, "draw", lambda _: None)
        return cli.train_command([part for text in arguments for part in str(text).split("|")])


@contextlib.contextmanager
def quickly():
    """What `Trainer` compiles runs once or twice: with the least effort."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "purejaxppo.train.compiler_options",
            lambda setup, quick: effort.compiler_options(setup, quick=True),
        )
        yield


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


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


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


def refused(capsys, *arguments):
    """The error of a command line that is refused."""
    capsys.readouterr()
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert "compiled" not in out
    assert err.startswith("purejaxppo: error: ")
    assert err.count("\n") == 1
    return err
