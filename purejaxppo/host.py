"""The host's side of a training: directory, compilation, chunks, evaluation, the books between."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

import purejaxppo
from purejaxppo import envs
from purejaxppo.config import ConfigError, RunOptions, Settings
from purejaxppo.display import Display
from purejaxppo.envs.base import Vectorized
from purejaxppo.loggers import EvaluationTable, MetricsTable, pool
from purejaxppo.ppo import Setup
from purejaxppo.report import plot_learning_curve, write_summary
from purejaxppo.spaces import Box
from purejaxppo.train import MAX_CHUNK, Plan, Trainer, make_plan, make_setup, stack_hypers

# A chunk lasts about so long, so that progress moves and Ctrl-C is heard.
_CHUNK_SECONDS = 0.5


def train(settings: Settings) -> int:
    """Trains all runs of valid settings, shows it, and fills the run directory.

    Returns:
        The exit status: 0, or 1 if every run diverged, or 130 if it was interrupted.

    Raises:
        ConfigError: what cannot be known before the environment is: a name, an argument, a head
            that does not fit, a directory in use. Nothing has been compiled by then.
    """
    gc.disable()  # starting makes many objects and no garbage; `_compile` turns it on again
    try:
        return _train(settings)
    finally:
        gc.enable()


def _train(settings: Settings) -> int:
    sys.path.insert(0, os.getcwd())  # for --env my_module:MyEnv, with the console script too
    _configure_jax(settings.run)
    env = envs.make(settings.config.env, settings.config.env_options)
    setup = make_setup(settings.config, env)
    if settings.hyper.init_log_std and not isinstance(env.action_space, Box):
        raise ConfigError(
            f"--init-log-std does not fit {settings.config.env}, whose actions are "
            f"{env.action_space}"
        )
    eval_env = Vectorized(env, max(settings.run.eval_episodes, 1), pool_size=1)
    plan = make_plan(settings.run.num_seeds, settings.run.runs_per_block)
    # The block fixes the arithmetic, so it is written down even where it was not asked for.
    planned = dataclasses.replace(settings.run, runs_per_block=plan.block)
    run_dir = _make_run_dir(dataclasses.replace(settings, run=planned))
    display = Display(settings.config.iterations * settings.config.batch_size)
    training = _Training(settings, Trainer(setup, plan, eval_env), run_dir, display)
    display.header(_header(settings, setup, plan, run_dir, training.num_params()))
    status = training.run()
    display.say(f"written to {run_dir}")
    return status


def _configure_jax(run: RunOptions) -> None:
    """Devices and compilation cache; must come before anything runs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(RuntimeError):  # the backend is up already, as in tests
        jax.config.update("jax_num_cpu_devices", max(1, min(cores or 1, run.num_seeds)))
    if not run.compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "purejaxppo"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _make_run_dir(settings: Settings) -> Path:
    """Creates the run directory, with the complete configuration in it."""
    name = settings.run.run_dir
    if name is None:
        env = re.sub(r"[^\w.-]+", "-", settings.config.env)
        name = f"runs/{env}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path(name)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"--run-dir {path}: in use; give another, or remove it first")
        path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(settings.to_dict(), sort_keys=False)
        (path / "config.yaml").write_text(text)
    except OSError as error:
        raise ConfigError(f"--run-dir {path}: {error.strerror}") from None
    return path


def _header(
    settings: Settings, setup: Setup, plan: Plan, run_dir: Path, num_params: int
) -> dict[str, str]:
    config, run = settings.config, settings.run
    steps = config.iterations * config.batch_size
    rounded = "" if steps == config.total_timesteps else f", up from {config.total_timesteps:,}"
    resets = "a new start state at every reset"
    if config.reset_mode == "pool":
        size = min(config.pool_size, config.num_steps)
        resets = (
            f"from a pool of {size} start state{'s'[: size > 1]} for each environment, drawn anew for "
            "every rollout"
        )
    device = jax.devices()[0]
    last = f" ... {run.seed + run.num_seeds - 1}" if run.num_seeds > 1 else ""
    return {
        "environment": f"{config.env}: {setup.env.observation_space} -> {setup.env.action_space}",
        "resets": resets,
        "parameters": f"{num_params:,}",
        "steps": f"{steps:,} in {config.iterations:,} iterations of {config.num_envs} environments"
        f" x {config.num_steps} steps{rounded}",
        "runs": f"{run.num_seeds}, seed {run.seed}{last}, in blocks of {plan.block}",
        "device": f"{plan.num_devices} x {device.device_kind} ({device.platform})",
        "directory": str(run_dir),
    }


class _Training:
    """The host's side of a training: it asks for chunks, and keeps the books between them."""

    def __init__(
        self, settings: Settings, trainer: Trainer, run_dir: Path, display: Display
    ) -> None:
        config, run = settings.config, settings.run
        self.settings, self.trainer = settings, trainer
        self.run_dir, self.display = run_dir, display
        self.seeds = [run.seed + i for i in range(run.num_seeds)]
        interval = -(-config.iterations // run.metrics_rows) if run.metrics_rows else 1
        self.metrics = MetricsTable(
            run_dir / "metrics.csv", self.seeds, interval, config.batch_size
        )
        self.evaluations = EvaluationTable(run_dir / "evaluation.csv", self.seeds)
        self.iteration = 0
        self.seconds = 0.0  # of training alone
        self.compile_seconds = 0.0
        self.diverged = np.zeros(run.num_seeds, bool)
        self.interrupted = False
        self.started = time.monotonic()
        self.hypers = trainer.shard(stack_hypers([settings.hyper] * run.num_seeds))
        self.start = (trainer.shard(np.array(self.seeds, np.uint32)), self.hypers, ())

    def num_params(self) -> int:
        """Parameters of a run, from a trace that compilation uses again."""
        params = jax.eval_shape(self.trainer.init, *self.start).params
        return sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(params))

    def run(self) -> int:
        """Trains to the end or to Ctrl-C or SIGTERM, and writes what there is either way."""
        with self._deferred_signals():
            try:
                self._compile()
                self.display.start()
                self._train()
            finally:
                self.display.stop()
                self.metrics.close()
                self.evaluations.close()
            if self.interrupted:
                self.display.say(f"interrupted after {self.iteration:,} iterations")
            self._finish()
        return 130 if self.interrupted else int(self.diverged.all())

    @contextlib.contextmanager
    def _deferred_signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM lets the chunk in progress end; the second is not awaited."""

        def stop(number: int, _: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _compile(self) -> None:
        run = self.settings.run
        started = time.monotonic()
        trainer, shared = self.trainer, (np.int32(1), np.float32(1))
        states = trainer.sharded_like(jax.eval_shape(trainer.init, *self.start))
        programs = [
            trainer.init.lower(*self.start),
            trainer.chunk.lower(states, self.hypers, shared),
        ]
        if run.eval_episodes:
            programs.append(trainer.evaluate.lower(states, self.hypers, ()))
        with ThreadPoolExecutor() as threads:  # XLA compiles without Python's lock
            init, self._chunk, *rest = threads.map(lambda program: program.compile(), programs)
        self._evaluate = rest[0] if rest else None
        self.states = init(*self.start)
        self.compile_seconds = time.monotonic() - started
        gc.freeze()
        gc.enable()
        memory = self._chunk.memory_analysis()
        size = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        self.display.say(
            f"compiled in {self.compile_seconds:.1f} s, {size / 2**20:,.1f} MiB a device"
        )

    def _train(self) -> None:
        config, run = self.settings.config, self.settings.run
        every = run.eval_every
        if every is None:
            every = config.total_timesteps / 20
        every = max(1, round(every / config.batch_size)) if every else config.iterations
        count = 1
        while self.iteration < config.iterations and not self.interrupted:
            until = min(config.iterations, (self.iteration // every + 1) * every)
            count = min(count, MAX_CHUNK, until - self.iteration)
            seconds = self._train_chunk(count)
            count = max(1, int(_CHUNK_SECONDS * count / seconds))
            if run.eval_episodes and self.iteration == until and not self.interrupted:
                self._evaluate_now()
        # What the last update did shows in no loss.
        for leaf in jax.tree.leaves(self.trainer.fetch(self.states.params)):
            self.diverged |= ~np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)

    def _train_chunk(self, count: int) -> float:
        """`count` iterations; returns the seconds they took."""
        config = self.settings.config
        shared = (np.int32(count), np.float32(config.iterations))
        started = time.monotonic()
        self.states, chunk = self._chunk(self.states, self.hypers, shared)
        chunk = self.trainer.fetch(chunk)
        seconds = time.monotonic() - started
        self.seconds += seconds
        self.iteration += count
        metrics = {name: array[:, :count].T for name, array in vars(chunk).items()}
        self.metrics.add(metrics)
        losses = metrics["policy_loss"] + metrics["value_loss"] + metrics["grad_norm"]
        self.diverged |= ~np.isfinite(losses).all(axis=0)
        returns = pool(metrics)["episode_return"]
        self.display.update(
            self.iteration * config.batch_size,
            float(np.nanmean(returns)) if np.isfinite(returns).any() else math.nan,
            self._steps_per_second(),
        )
        return seconds

    def _steps_per_second(self) -> float:
        steps = self.iteration * self.settings.config.batch_size * len(self.seeds)
        return steps / max(self.seconds, 1e-9)

    def _evaluate_now(self) -> None:
        assert self._evaluate is not None
        episodes = self.trainer.fetch(self._evaluate(self.states, self.hypers, ()))
        env_steps = self.iteration * self.settings.config.batch_size
        self.evaluations.add(episodes, self.iteration, env_steps)

    def _finish(self) -> None:
        """Summary, plot and final table."""
        config = self.settings.config
        final = [row for row in self.evaluations.rows if row["iteration"] == self.iteration]
        means = [row["return_mean"] for row in final]
        summary = {
            "env": config.env,
            "evaluation": {
                "return_mean": float(np.mean(means)) if final else math.nan,
                "return_std": float(np.std(means, ddof=1)) if len(final) > 1 else math.nan,
                "return_per_run": means,
                "return_std_per_run": [row["return_std"] for row in final],
                "episodes": self.settings.run.eval_episodes,
            },
            "seeds": self.seeds,
            "env_steps": self.iteration * config.batch_size,
            "steps_per_second": self._steps_per_second(),
            "compile_seconds": self.compile_seconds,
            "wall_seconds": time.monotonic() - self.started,
            "diverged_runs": [s for s, bad in zip(self.seeds, self.diverged, strict=True) if bad],
            "interrupted": self.interrupted,
            "versions": _versions(),
            "device": f"{jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        }
        write_summary(self.run_dir / "summary.json", summary)
        title = f"{config.env}, PPO"
        rows = self.metrics.rows
        plot_learning_curve(self.run_dir / "learning_curve.png", title, rows, self.evaluations.rows)
        self.display.results(summary, self.seeds)


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "gymnax", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"purejaxppo": purejaxppo.__version__, "python": platform.python_version(), **versions}
