"""The loop of one compiled program, on the host: chunks, evaluations, and the books between."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from purejaxppo import envs
from purejaxppo.config import Config, ConfigError, RunOptions
from purejaxppo.display import Display
from purejaxppo.envs.base import Vectorized
from purejaxppo.loggers import EvaluationTable, MetricsTable, Tables, pool
from purejaxppo.machine import Interrupt, Memory, agree, gib, resident_bytes
from purejaxppo.spaces import Box
from purejaxppo.sweep import Run, describe
from purejaxppo.train import (
    MAX_CHUNK,
    Plan,
    Trainer,
    fit,
    make_footprint,
    make_plan,
    make_setup,
    stack_hypers,
)

# A chunk lasts about so long, so that progress moves and Ctrl-C is heard.
_CHUNK_SECONDS = 0.5


class Training:
    """The runs that share a compiled program, from their plan to their last evaluation.

    Args:
        runs: of one `Config`.
        memory: for the arrays of all of them.

    Attributes:
        seconds: of training alone.

    Raises:
        ConfigError: what cannot be known before the environment is: a name, an argument, a head
            that does not fit; or more runs than memory. Nothing has been compiled by then.
    """

    def __init__(
        self, options: RunOptions, runs: list[Run], display: Display, memory: Memory
    ) -> None:
        self.options, self.runs, self.display = options, runs, display
        self.config = runs[0].setting.config
        self._env = envs.make(self.config.env, self.config.env_options)
        _check_hypers(self.config, self._env, runs)
        by_environment = options.shard == "environments"
        block = None if options.runs_per_block == "auto" else options.runs_per_block
        self._lay_out(make_plan(len(runs), block, by_environment))
        self._fit_into(memory)
        self.iteration = 0
        self.seconds = 0.0
        self.compile_seconds = 0.0
        self._diverged = np.zeros(len(runs), bool)

    def _lay_out(self, plan: Plan) -> None:
        """The programs of a plan, and the runs on its devices."""
        self.plan = plan
        setup = make_setup(_share(self.config, plan.shards), self._env)
        episodes = max(1, -(-self.options.eval_episodes // plan.shards))
        self.trainer = Trainer(setup, plan, Vectorized(self._env, episodes, pool_size=1))
        self._hypers = self.trainer.shard(stack_hypers([run.setting.hyper for run in self.runs]))
        seeds = np.array([run.seed for run in self.runs], np.uint32)
        self._start = (self.trainer.shard(seeds), self._hypers, ())
        # A trace that compilation uses again.
        self._shapes = self.trainer.sharded_like(jax.eval_shape(self.trainer.init, *self._start))

    def _fit_into(self, memory: Memory) -> None:
        """Smaller blocks where these runs would not fit."""
        footprint = make_footprint(self.trainer.setup, self.plan, self._shapes)
        room = memory.of(self.plan.num_devices * self.plan.shards)
        plan = fit(self.plan, footprint, room)
        self.expected_bytes = footprint.total(plan or self.plan)
        if plan == self.plan:
            return
        asked = self.options.runs_per_block != "auto"
        if plan is None or asked:
            least = self.plan if asked else dataclasses.replace(self.plan, block=1)
            raise ConfigError(
                f"{len(self.runs)} runs in blocks of {least.block} need "
                f"{gib(footprint.total(least))} beside the program itself, and there is room for "
                f"{gib(room)}: give fewer runs, a smaller --runs-per-block or --num-envs, or more "
                "--memory-limit"
            )
        self._lay_out(plan)

    @property
    def num_params(self) -> int:
        """Parameters of a run."""
        leading = 1 if self.plan.shards == 1 else 2
        return sum(math.prod(leaf.shape[leading:]) for leaf in jax.tree.leaves(self._shapes.params))

    @property
    def description(self) -> str:
        """What distinguishes it from a sweep's other programs."""
        swept = self.runs[0].setting.swept.items()
        static = {name: v for name, v in swept if name in vars(self.config) or v is None}
        runs = f"{len(self.runs)} runs, {self.num_params:,} parameters"
        return f"{describe(static)}: {runs}" if static else runs

    @property
    def steps(self) -> int:
        """Environment steps so far, of all runs."""
        return self.iteration * self.config.batch_size * len(self.runs)

    @property
    def diverged_runs(self) -> list[int]:
        """Their numbers."""
        return [run.number for run, bad in zip(self.runs, self._diverged, strict=True) if bad]

    def run(self, tables: Tables, interrupt: Interrupt) -> None:
        """Trains to the end or to an interrupt."""
        rows = self.options.metrics_rows
        interval = -(-self.config.iterations // rows) if rows else 1
        self._metrics = MetricsTable(tables.metrics, self.runs, interval, self.config.batch_size)
        self._evaluations = EvaluationTable(tables.evaluation, self.runs)
        self._interrupt = interrupt
        try:
            self._compile()
            self.display.start(self.config.iterations * self.config.batch_size)
            self._train()
        finally:
            self.display.stop()
            self._metrics.flush()
        if interrupt.stopped:
            self.display.say(f"interrupted after {self.iteration:,} iterations")

    def _compile(self) -> None:
        started = time.monotonic()
        trainer, shared = self.trainer, (np.int32(1), np.float32(1))
        programs = [
            trainer.init.lower(*self._start),
            trainer.chunk.lower(self._shapes, self._hypers, shared),
        ]
        if self.options.eval_episodes:
            programs.append(trainer.evaluate.lower(self._shapes, self._hypers, ()))
        with ThreadPoolExecutor() as threads:  # XLA compiles without Python's lock
            init, self._chunk, *rest = threads.map(lambda program: program.compile(), programs)
        self._evaluate = rest[0] if rest else None
        memory = self._memory([self._chunk, *rest])
        self._states = init(*self._start)
        self.compile_seconds = time.monotonic() - started
        gc.freeze()
        gc.enable()
        self.display.say(f"compiled in {self.compile_seconds:.1f} s, {memory}")

    def _memory(self, programs: list[Any]) -> str:
        """What the largest of compiled programs takes, in words."""
        size = 0
        for program in programs:
            memory = program.memory_analysis()
            needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
            size = max(size, needed)
        if jax.default_backend() != "cpu":
            return f"{gib(size)} of memory a device"
        return f"{gib(size * self.plan.num_devices * self.plan.shards + resident_bytes())} of memory in all"

    def _train(self) -> None:
        config = self.config
        every = self.options.eval_every
        if every is None:
            every = config.total_timesteps / 20
        every = max(1, round(every / config.batch_size)) if every else config.iterations
        count = 1
        while self.iteration < config.iterations and not self._interrupt.check():
            until = min(config.iterations, (self.iteration // every + 1) * every)
            count = min(count, MAX_CHUNK, until - self.iteration)
            started = time.monotonic()
            episode_return = self._train_chunk(count)
            (seconds,) = agree(time.monotonic() - started)  # all processes must do the same
            self.seconds += seconds
            done = self.iteration * config.batch_size
            self.display.update(done, episode_return, self.steps / self.seconds)
            count = max(1, int(_CHUNK_SECONDS * count / seconds))
            if self._evaluate and self.iteration == until and not self._interrupt.check():
                self._evaluate_now()
        # What the last update did shows in no loss.
        for leaf in jax.tree.leaves(self.trainer.fetch(self._states.params)):
            self._diverged |= ~np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
        del self._states  # a sweep's next program needs the room

    def _train_chunk(self, count: int) -> float:
        """`count` iterations and their rows; the mean return of the episodes that ended, or NaN."""
        shared = (np.int32(count), np.float32(self.config.iterations))
        self._states, chunk = self._chunk(self._states, self._hypers, shared)
        chunk = self.trainer.fetch(chunk)
        self.iteration += count
        metrics = {name: array[..., :count].T for name, array in vars(chunk).items()}
        if self.plan.shards > 1:  # [C, D, R], of each device's environments
            metrics = pool({name: np.moveaxis(array, 1, 0) for name, array in metrics.items()})
        self._metrics.add(metrics)
        losses = metrics["policy_loss"] + metrics["value_loss"] + metrics["grad_norm"]
        self._diverged |= ~np.isfinite(losses).all(axis=0)
        returns = pool(metrics)["episode_return"]
        return float(np.nanmean(returns)) if np.isfinite(returns).any() else math.nan

    def _evaluate_now(self) -> None:
        assert self._evaluate is not None
        episodes = self.trainer.fetch(self._evaluate(self._states, self._hypers, ()))
        wanted = len(self.runs), self.options.eval_episodes
        episodes = jax.tree.map(lambda x: x.reshape(wanted[0], -1)[:, : wanted[1]], episodes)
        env_steps = self.iteration * self.config.batch_size
        self._evaluations.add(episodes, self.iteration, env_steps)


def _share(config: Config, shards: int) -> Config:
    """The configuration of one of several devices that share the environments."""
    if shards == 1:
        return config
    share = dataclasses.replace(config, num_envs=config.num_envs // shards)
    if config.num_envs % shards or share.batch_size % config.num_minibatches:
        raise ConfigError(
            f"--shard environments: --num-envs {config.num_envs} cannot be divided among {shards} "
            f"devices (JAX_NUM_CPU_DEVICES), each with --num-minibatches {config.num_minibatches}"
        )
    if config.minibatches == "sequences" and share.num_envs % config.num_minibatches:
        raise ConfigError(
            f"--shard environments: the {share.num_envs} environments of a device are not divisible "
            f"by --num-minibatches {config.num_minibatches}, as --minibatches sequences needs"
        )
    return share


def _check_hypers(config: Config, env: envs.Environment, runs: list[Run]) -> None:
    """Raises ConfigError where a hyperparameter does not fit the environment."""
    if any(run.setting.hyper.init_log_std for run in runs) and not isinstance(
        env.action_space, Box
    ):
        raise ConfigError(
            f"--init-log-std does not fit {config.env}, whose actions are {env.action_space}"
        )
