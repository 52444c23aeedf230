"""The loop of one compiled program, on the host: chunks, evaluations, and the books between."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purejaxppo import envs
from purejaxppo.checkpoint import Best, Checkpoint, Writer, finite, flatten
from purejaxppo.config import Config, RunOptions
from purejaxppo.display import Display
from purejaxppo.loggers import EvaluationTable, MetricsTable, Tables, blank_diverged, pool
from purejaxppo.machine import Interrupt, Memory, agree, gib, resident_bytes
from purejaxppo.policy import Policy, acting
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
    nbytes,
    run_shapes,
    saved_shapes,
    stack_hypers,
)
from purejaxppo.types import Metrics, PyTree, TrainState
from purejaxppo.values import ConfigError

# A chunk lasts about so long, so that progress moves and Ctrl-C is heard.
_CHUNK_SECONDS = 0.5


class Training:
    """The runs that share a compiled program, from their plan to their last evaluation.

    Args:
        runs: of one `Config`.
        memory: for the arrays of all of them.
        checkpoint: to go on from.

    Attributes:
        seconds: of training alone, also of that before the checkpoint.

    Raises:
        ConfigError: what cannot be known before the environment is: a name, an argument, a head
            that does not fit; or more runs than memory; or a checkpoint of something else. Nothing
            has been compiled by then.
    """

    def __init__(
        self,
        options: RunOptions,
        runs: list[Run],
        display: Display,
        memory: Memory,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.options, self.runs, self.display = options, runs, display
        self.config = runs[0].setting.config
        self._env = envs.make(self.config.env, self.config.env_options)
        _check_hypers(self.config, self._env, runs)
        if options.video_every:
            from purejaxppo.render import find_sketch  # takes its time to import

            find_sketch(self._env, self.config.env)
        by_environment = options.shard == "environments"
        block = None if options.runs_per_block == "auto" else options.runs_per_block
        if block is None and checkpoint is not None:
            block = checkpoint.facts["block"]
        self.external = envs.is_external(self._env)
        if self.external:
            _check_external(self.config, options, len(runs), memory)
            self._lay_out(Plan(len(runs), 1, len(runs)))
        else:
            setup = make_setup(self.config, self._env)
            self._lay_out(make_plan(setup, len(runs), block, by_environment))
        self._fit_into(memory)
        rows = options.metrics_rows
        self._interval = -(-self.config.iterations // rows) if rows else 1
        every = options.eval_every
        self._every = self._iterations(self.config.total_timesteps / 20 if every is None else every)
        self._pending: dict[str, np.ndarray] = {}
        self._rows = {"metrics.csv": 0, "evaluation.csv": 0}
        self._best = Best(acting(self._whole), len(runs))
        self._diverged = np.zeros(len(runs), bool)
        self.iteration = self._saved = 0
        self.seconds = self.compile_seconds = 0.0
        self._restored: PyTree = None
        self._running: tuple[int, Metrics] | None = None  # the chunk on its way
        self._chunk_size = 1
        if checkpoint is not None:
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Takes up where a checkpoint was made."""
        facts = checkpoint.facts
        self.iteration = self._saved = checkpoint.iteration
        self.seconds = facts["seconds"]
        self._diverged[facts["diverged"]] = True
        if self.iteration == self.config.iterations:
            return
        self._restored = checkpoint.tree("state", self._whole)
        best = checkpoint.tree("best", self._best.tree)
        self._best.score, self._best.iteration = best.pop("score"), best.pop("iteration")
        self._best.policy = best
        self._pending = checkpoint.named("pending")
        self._rows = {name: kept["rows"] for name, kept in facts["tables"].items()}
        # What depends on the length of the training stays as it was begun.
        if self.options.metrics_rows == facts["metrics_rows"]:
            self._interval = facts["interval"]
        if self.options.eval_every is None:
            self._every = facts["every"]

    def _lay_out(self, plan: Plan) -> None:
        """The programs of a plan, and the runs on its devices."""
        self.plan = plan
        seeds = [run.seed for run in self.runs]
        setup = make_setup(_share(self.config, plan.shards), self._env, seeds)
        episodes = max(1, -(-self.options.eval_episodes // plan.shards))
        self._eval_env = envs.vectorize(self.config, self._env, episodes, seeds)
        self.trainer = Trainer(setup, plan, self._eval_env, self.options.eval_sampled)
        self._hypers = self.trainer.shard(stack_hypers([run.setting.hyper for run in self.runs]))
        self._start = (self.trainer.shard(np.array(seeds, np.uint32)), self._hypers, ())
        # A trace that compilation uses again.
        self._shapes = self.trainer.sharded_like(jax.eval_shape(self.trainer.init, *self._start))
        if plan.shards == 1:
            run = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._shapes)
        else:
            run = run_shapes(make_setup(self.config, self._env), self.runs[0].setting.hyper)
        self._whole = saved_shapes(run, len(self.runs))

    def _fit_into(self, memory: Memory) -> None:
        """Smaller blocks where these runs would not fit."""
        saved = self._saved_bytes // len(self.runs)
        episodes = self._eval_env.num_envs
        footprint = make_footprint(self.trainer.setup, self.plan, self._shapes, saved, episodes)
        room = memory.of(self.plan.num_devices * self.plan.shards)
        if self.external:
            room -= _external_bytes(self.config, self.options, len(self.runs))
        plan = fit(self.plan, footprint, room)
        self.expected_bytes = footprint.total(plan or self.plan)
        if plan == self.plan:
            return
        asked = self.options.runs_per_block != "auto" or self.external
        if plan is None or asked:
            least = self.plan if asked else dataclasses.replace(self.plan, block=1)
            options = ["--num-envs", "--eval-episodes"]
            if least.block > 1 and not self.external:
                options.insert(0, "--runs-per-block")
            raise ConfigError(
                f"{len(self.runs)} runs in blocks of {least.block} need "
                f"{gib(footprint.total(least))} beside the program itself, and there is room for "
                f"{gib(room)}: give fewer runs, a smaller {' or '.join(options)}, or more --memory-limit"
            )
        self._lay_out(plan)

    @property
    def _saved_bytes(self) -> int:
        """Of host memory for a checkpoint, where devices have none of their own."""
        if not self.options.keep or jax.default_backend() != "cpu":
            return 0
        best = nbytes(acting(self._whole))  # there, and on its way
        return (nbytes(self._whole) + 2 * best) * jax.process_count()

    @property
    def num_params(self) -> int:
        """Parameters of a run."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._whole.params)) // len(self.runs)

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

    def run(
        self, tables: Tables, interrupt: Interrupt, writer: Writer | None, videos: Path
    ) -> None:
        """Trains to the end or to an interrupt.

        Args:
            writer: of its checkpoints, if this process makes them, and the videos.
            videos: where those go.

        Raises:
            OSError: a table or a checkpoint could not be written.
        """
        if self.iteration == self.config.iterations:
            return
        self._metrics = MetricsTable(
            tables.metrics,
            self.runs,
            self._interval,
            self.config.batch_size,
            self.iteration,
            self._pending,
            self._rows["metrics.csv"],
        )
        rows = self._rows["evaluation.csv"]
        self._evaluations = EvaluationTable(tables.evaluation, self.runs, rows)
        self._tables, self._interrupt, self._writer = tables, interrupt, writer
        self._videos = videos
        try:
            self._compile()
            batch = self.config.batch_size
            self.display.start(self.config.iterations * batch, self.iteration * batch)
            self._train()
        finally:
            self.display.stop()
            self._metrics.flush()
        if interrupt.signal:
            self.display.say(f"interrupted after {self.iteration:,} iterations")

    def _compile(self) -> None:
        started = time.monotonic()
        trainer, shared = self.trainer, (np.int32(1), np.float32(1))
        with ThreadPoolExecutor() as threads:

            def start(program: Any, *arguments: Any) -> Future[Any]:
                # XLA compiles without Python's lock, while the next program is traced.
                return threads.submit(program.lower(*arguments).compile)

            compiled = {"chunk": start(trainer.chunk, self._shapes, self._hypers, shared)}
            if self._restored is None or self.external:
                compiled["init"] = start(trainer.init, *self._start)
            if self.options.eval_episodes:
                compiled["evaluate"] = start(trainer.evaluate, self._shapes, self._hypers, ())
        ready = {name: program.result() for name, program in compiled.items()}
        self._chunk, self._evaluate = ready["chunk"], ready.get("evaluate")
        begun = None
        if "init" in ready:
            trainer.setup.env.prepare()
            begun = self._states = ready.pop("init")(*self._start)
        if self._restored is not None:
            self._states = trainer.put_whole(self._restored, self._shapes)
            self._restored = None
            if begun is not None:  # what lives outside of the program has begun anew
                self._states = _with_environments(self._states, begun)
        memory = self._memory(list(ready.values()))
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
        arrays = size * self.plan.num_devices * self.plan.shards + self._saved_bytes
        return f"{gib(arrays + resident_bytes())} of memory in all"

    def _train(self) -> None:
        total, every = self.config.iterations, self._every
        video = self._iterations(self.options.video_every or 0)
        saved = time.monotonic()
        while self.iteration < total and not self._interrupt.check():
            until = self._until(every, video, self.options.checkpoint_iterations or total)
            self._train_chunk(min(self._chunk_size, MAX_CHUNK, until - self.iteration))
            if self._evaluate and (self.iteration % every == 0 or self.iteration == total):
                self._evaluate_now()
            if self.options.video_every and (
                self.iteration % video == 0 or self.iteration == total
            ):
                self._draw()
            (seconds,) = agree(time.monotonic() - saved)
            if self._checkpoint_due(seconds):
                self._save()
                saved = time.monotonic()
        self._finish_chunk()
        if self.iteration == total:
            self._metrics.flush()  # a longer training begins an interval of its own
        # What the last update did shows in no loss.
        self._diverged |= ~finite(self.trainer.fetch_whole(self._states.params, self._whole.params))
        self._save()
        # A sweep's next program needs the room.
        del self._states, self._chunk, self._evaluate, self.trainer

    def _iterations(self, steps: float) -> int:
        """So many environment steps in iterations, rounded up; all of them for none."""
        return math.ceil(steps / self.config.batch_size) if steps else self.config.iterations

    def _until(self, *every: int) -> int:
        """The next iteration that is a multiple of one of these, or the last one of all."""
        return min(self.config.iterations, *((self.iteration // n + 1) * n for n in every))

    def _checkpoint_due(self, seconds: float) -> bool:
        """Whether to save, so many seconds after the last time."""
        iterations = self.options.checkpoint_iterations
        if iterations is not None:
            return self.iteration % iterations == 0
        return 0 < self.options.checkpoint_every <= seconds

    def _save(self) -> None:
        """A checkpoint of what there is now, unless it has been made, or is worth nothing."""
        if not self.options.keep or self.iteration == self._saved:
            return
        self._finish_chunk()
        if self._writer is not None:
            self._writer.wait()  # else the one before would take its memory too
        states = self.trainer.fetch_whole(self._states, self._whole)
        if not finite(states.params).any():
            return
        self._best.update(acting(states), self.iteration)
        self._saved = self.iteration
        if self._writer is None:
            return
        self._tables.sync()
        arrays = flatten("state", states) | flatten("pending", self._metrics.pending)
        arrays |= {name: x.copy() for name, x in flatten("best", self._best.tree).items()}
        self._writer.save(arrays, self._facts())

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint says beside its arrays."""
        return {
            "iteration": self.iteration,
            "interval": self._interval,
            "metrics_rows": self.options.metrics_rows,
            "every": self._every,
            "seconds": self.seconds,
            "diverged": np.flatnonzero(self._diverged).tolist(),
            "tables": {
                "metrics.csv": {"until": self._metrics.until, "rows": self._metrics.rows},
                "evaluation.csv": {"until": self.iteration, "rows": self._evaluations.rows},
            },
            "block": self.plan.block,
            "shards": self.plan.shards,
            "devices": self.plan.devices,
            "iterations": self.config.iterations,
        }

    def _train_chunk(self, count: int) -> None:
        """Starts `count` iterations; while they run, those before are written down."""
        if self._running is None:
            self._since = time.monotonic()
        shared = (np.int32(count), np.float32(self.config.iterations))
        self._states, metrics = self._chunk(self._states, self._hypers, shared)
        self.iteration += count
        self._finish_chunk()  # the one before, while this one runs
        self._running = count, metrics
        if jax.process_count() > 1:  # to gather would wait for what runs
            self._finish_chunk()

    def _finish_chunk(self) -> None:
        """Waits for the iterations that run, if any, and writes them down."""
        if self._running is not None:
            self._write_down(*self._running)
            self._running = None

    def _write_down(self, count: int, chunk: Metrics) -> None:
        """The rows of a chunk of `count` iterations, once it is done, and how long it took."""
        chunk = self.trainer.fetch(chunk)
        now = time.monotonic()
        (seconds,) = agree(now - self._since)  # all processes must do the same
        self._since = now
        self.seconds += seconds
        self._chunk_size = max(1, int(_CHUNK_SECONDS * count / seconds))
        metrics = {name: array[..., :count].T for name, array in vars(chunk).items()}
        if self.plan.shards > 1:  # [C, D, R], of each device's environments
            metrics = pool({name: np.moveaxis(array, 1, 0) for name, array in metrics.items()})
        metrics = blank_diverged(metrics, self.config.batch_size)
        self._metrics.add(metrics)
        losses = metrics["policy_loss"] + metrics["value_loss"] + metrics["grad_norm"]
        self._diverged |= ~np.isfinite(losses).all(axis=0)
        returns = pool(metrics)["episode_return"]
        mean = float(np.nanmean(returns)) if np.isfinite(returns).any() else math.nan
        done = self._metrics.iteration * self.config.batch_size
        self.display.update(done, mean, done * len(self.runs) / self.seconds)

    def _evaluate_now(self) -> None:
        assert self._evaluate is not None
        self._finish_chunk()
        self._eval_env.prepare()
        episodes = self.trainer.fetch(self._evaluate(self._states, self._hypers, ()))
        wanted = len(self.runs), self.options.eval_episodes
        episodes = jax.tree.map(lambda x: x.reshape(wanted[0], -1)[:, : wanted[1]], episodes)
        policies = self._fetch_policies()
        # What a run that diverged plays is not an episode.
        good = finite(policies["params"])[:, None]
        episodes = episodes.replace(ended=episodes.ended & good)
        env_steps = self.iteration * self.config.batch_size
        returns = self._evaluations.add(episodes, self.iteration, env_steps)
        if self.options.keep:
            score = np.where(np.isnan(returns), -np.inf, returns)
            self._best.update(policies, self.iteration, score)

    def _fetch_policies(self) -> dict[str, PyTree]:
        """Host arrays [R, ...] of what acts now."""
        states, whole = acting(self._states), acting(self._whole)
        return self.trainer.fetch_whole(states, whole)

    def _draw(self) -> None:
        """A video of the first run as it is now."""
        from purejaxppo.render import render

        self._finish_chunk()
        saved = self._fetch_policies()
        run, own = self.runs[0], jax.tree.map(lambda x: x[0], saved)
        if self._writer is None or not finite(saved["params"])[0]:
            return
        agent = self.trainer.setup.agent
        policy = Policy(run, self._env, agent, own["params"], own["obs_stats"], self.iteration)
        self._videos.mkdir(exist_ok=True)
        steps = self.iteration * self.config.batch_size
        path = self._videos / f"run{run.number}-{steps:012d}.gif"
        try:
            render(policy, path, episodes=1, sampled=self.options.eval_sampled)
        except ConfigError as error:  # a film is not worth a training
            self.display.say(f"no video: {error}")
        else:
            self._tables.video(run.number, steps, path)


def _with_environments(states: TrainState, begun: TrainState) -> TrainState:
    """States whose environments, and the returns of their episodes so far, are those of others."""
    return_stats = states.return_stats
    if return_stats is not None and begun.return_stats is not None:
        return_stats = return_stats.replace(trace=begun.return_stats.trace)
    return states.replace(env_state=begun.env_state, first=begun.first, return_stats=return_stats)


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


def _external_bytes(config: Config, options: RunOptions, num_runs: int) -> int:
    """Host memory of environments outside of the program."""
    return num_runs * (config.num_envs + options.eval_episodes) * envs.EXTERNAL_BYTES


def _check_external(config: Config, options: RunOptions, num_runs: int, memory: Memory) -> None:
    """Raises ConfigError for what environments outside of the program cannot do."""
    needed, room = _external_bytes(config, options, num_runs), memory.of(1)
    if needed > room:
        raise ConfigError(
            f"the environments of {config.env} need {gib(needed)}, and there is room for {gib(room)}: "
            "give fewer runs, or a smaller --num-envs or --eval-episodes"
        )
    for name in ("reset_mode", "pool_size"):
        value = getattr(config, name)
        if value != getattr(Config, name):
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} {value}: the environments of {config.env} reset themselves"
            )
    reason = f"the environments of {config.env} live outside of the compiled program, in one pool"
    if options.shard == "environments":
        raise ConfigError(f"--shard environments: {reason}")
    if options.distributed:
        raise ConfigError(f"--distributed: {reason}")
    if options.runs_per_block != "auto" and options.runs_per_block < num_runs:
        raise ConfigError(f"--runs-per-block {options.runs_per_block}: {reason} for all runs")


def _check_hypers(config: Config, env: envs.Environment, runs: list[Run]) -> None:
    """Raises ConfigError where a hyperparameter does not fit the environment."""
    if any(run.setting.hyper.init_log_std for run in runs) and not isinstance(
        env.action_space, Box
    ):
        raise ConfigError(
            f"--init-log-std does not fit {config.env}, whose actions are {env.action_space}"
        )
