"""The runs of one configuration as one program: laid out on devices, within memory, and compiled."""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from purejaxppo import envs
from purejaxppo.config import Config, RunOptions
from purejaxppo.effort import compiler_options
from purejaxppo.evaluate import MAX_STEPS
from purejaxppo.executables import Executable, fingerprint
from purejaxppo.machine import Memory, gib, resident_bytes
from purejaxppo.plan import Plan, fit, make_footprint, make_plan, nbytes
from purejaxppo.policy import acting
from purejaxppo.processes import check_same
from purejaxppo.rollouts import num_microbatches
from purejaxppo.spaces import Box
from purejaxppo.sweep import Run, describe
from purejaxppo.train import Trainer, make_setup, run_shapes, saved_shapes, stack_hypers
from purejaxppo.values import ConfigError


class Compiled(NamedTuple):
    """The functions of a `Trainer`, ready to be called."""

    chunk: Any
    init: Any  # None where nothing begins
    evaluate: Any  # None without episodes
    loaded: bool  # all of them, as they were compiled before
    num_bytes: int  # that the largest of them takes on a device


class Program:
    """What trains and evaluates runs of one `Config`.

    Args:
        memory: for the arrays of all of them.
        block: of so many runs, as before, where the options leave it open.
        effort: of its chunk before, if on such a device, likewise.
        begun: the iteration that it goes on from.
        evaluations: of a whole training.

    Attributes:
        env: one environment, as `envs.make` gives it.
        eval_env: those that evaluations step.
        hypers: [R] on the devices.
        start: what `Trainer.init` is called with.
        shapes: of the state as it lies on the devices.
        whole: of the state as it is saved, [R, ...] whatever the devices.
        expected_bytes: of all arrays, beside the program itself.
        external: whether the environments live outside of it.
        external_bytes: host memory that those take, for as long as the process lives.

    Raises:
        ConfigError: what cannot be known before the environment is: a name, an argument, a head
            that does not fit; or more runs than memory. Nothing has been compiled by then.
    """

    def __init__(
        self,
        options: RunOptions,
        runs: list[Run],
        memory: Memory,
        block: int | None = None,
        effort: str | None = None,
        begun: int = 0,
        evaluations: int = 1,
    ) -> None:
        self.options, self.runs, self._effort_before, self._begun = options, runs, effort, begun
        self._evaluations = evaluations
        self.config = runs[0].setting.config
        self.env = envs.make(self.config.env, self.config.env_options)
        self.external = envs.is_external(self.env)
        _check_hypers(self.config, self.env, runs)
        if self.config.dense == "fused" and jax.default_backend() == "tpu":
            raise ConfigError("--dense fused: these kernels are for GPUs, and this is a TPU")
        if options.compile_effort == "quick" and jax.default_backend() == "tpu":
            raise ConfigError(
                "--compile-effort quick: only CPUs and GPUs have programs of two kinds"
            )
        if options.runs_per_block != "auto":
            block = options.runs_per_block
        self.external_bytes = 0
        if self.external:
            environments = self.config.num_envs + options.eval_episodes
            self.external_bytes = len(runs) * environments * getattr(self.env, "host_bytes", 0)
            _check_external(self.config, options, len(runs), self.external_bytes, memory)
            self._lay_out(Plan(len(runs), 1, len(runs)))
        else:
            setup = make_setup(self.config, self.env)
            self._lay_out(make_plan(setup, len(runs), block, options.shard == "environments"))
        self._fit_into(memory)
        # CPUs with different numbers of cores would have different parts.
        check_same({"microbatch_size": num_microbatches(self.trainer.setup)})

    def _lay_out(self, plan: Plan) -> None:
        """The programs of a plan, and the runs on its devices."""
        self.plan = plan
        seeds = [run.seed for run in self.runs]
        setup = make_setup(self.config, self.env, seeds, self._begun)
        if plan.shards > 1:
            share = _share(self.config, plan.shards)
            setup = setup._replace(config=share, env=envs.vectorize(share, self.env))
        episodes = max(1, -(-self.options.eval_episodes // plan.shards))
        self.eval_env = envs.vectorize(self.config, self.env, episodes, seeds, self._begun)
        self.trainer = Trainer(setup, plan, self.eval_env, self.options.eval_sampled)
        self.hypers = self.trainer.shard(stack_hypers([run.setting.hyper for run in self.runs]))
        self.start = (self.trainer.shard(np.array(seeds, np.uint32)), self.hypers, ())
        self._init = self._executable("init", self.start, "quick")
        self.shapes = self.trainer.sharded_like(self._init.out_shapes)
        if plan.shards == 1:
            run = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.shapes)
        else:
            run = run_shapes(make_setup(self.config, self.env), self.runs[0].setting.hyper)
        self.whole = saved_shapes(run, len(self.runs))

    def _fit_into(self, memory: Memory) -> None:
        """Smaller blocks where these runs would not fit."""
        saved = self._saved_bytes // len(self.runs)
        episodes = self.eval_env.num_envs
        footprint = make_footprint(self.trainer.setup, self.plan, self.shapes, saved, episodes)
        room = memory.of(self.plan.num_devices * self.plan.shards)
        room -= self.external_bytes
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

    @functools.cached_property
    def _chunk(self) -> Executable:
        arguments = self.shapes, self.hypers, (np.int32(1), np.float32(1))
        asked = self._asked(self._effort_before)
        return self._executable("chunk", arguments, asked, self.config.iterations)

    @functools.cached_property
    def _evaluation(self) -> Executable:
        steps = self._evaluations * (self.eval_env.max_episode_steps or MAX_STEPS)
        arguments = self.shapes, self.hypers, ()
        evaluated = self.eval_env.num_envs, self.options.eval_sampled
        return self._executable("evaluate", arguments, self._asked(), steps, evaluated)

    def _asked(self, before: str | None = None) -> str:
        """The effort to compile with; before: the one of a training that goes on."""
        asked = self.options.compile_effort
        if asked != "auto":
            return asked
        return "full" if jax.default_backend() == "tpu" else before or "auto"

    def _executable(
        self, name: str, arguments: tuple[Any, ...], asked: str, calls: int = 1, also: Any = None
    ) -> Executable:
        """One of the trainer's functions; also: what it is made of beside environment, agent and plan."""
        key = None
        if envs.is_shipped(self.config.env) and not self.external:
            config = dataclasses.replace(self.config, total_timesteps=0)  # an argument of the chunk
            shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(arguments)]
            structure = str(jax.tree.structure(arguments))
            key = fingerprint(name, config, self.plan, shapes, structure, also)
        quick = compiler_options(self.trainer.setup, quick=True)
        devices = list(self.trainer.mesh.devices.flat)
        function = getattr(self.trainer, name)
        return Executable(function, arguments, asked, calls, quick, devices, key)

    @property
    def effort(self) -> str:
        """That the chunk is compiled with: quick, to a slower program that rounds differently, or full."""
        return self._chunk.effort

    @property
    def evaluation_effort(self) -> str | None:
        """Likewise; None where evaluations have no episodes."""
        return self._evaluation.effort if self.options.eval_episodes else None

    @property
    def _saved_bytes(self) -> int:
        """Of host memory for a checkpoint, where devices have none of their own."""
        if not self.options.keep or jax.default_backend() != "cpu":
            return 0
        best = nbytes(acting(self.whole))  # there, and on its way
        return (nbytes(self.whole) + 2 * best) * jax.process_count()

    @property
    def num_params(self) -> int:
        """Parameters of a run."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.whole.params)) // len(self.runs)

    @property
    def description(self) -> str:
        """What distinguishes it from a sweep's other programs."""
        swept = self.runs[0].setting.swept.items()
        static = {name: v for name, v in swept if name in vars(self.config) or v is None}
        runs = f"{len(self.runs)} runs, {self.num_params:,} parameters"
        return f"{describe(static)}: {runs}" if static else runs

    def compile(self, begins: bool) -> Compiled:
        """Side by side.

        Args:
            begins: whether states are to be made, and not restored alone.
        """
        init = self._init if begins else None
        evaluation = self._evaluation if self.options.eval_episodes else None
        wanted = self._chunk, init, evaluation
        with ThreadPoolExecutor() as threads:
            started = [each and each.start(threads) for each in wanted]
        chunk, init, evaluate = (each and each.result() for each in started)
        there = [each for each in wanted if each]
        loaded, num_bytes = all(x.loaded for x in there), max(x.num_bytes for x in there)
        return Compiled(chunk, init, evaluate, loaded, num_bytes)

    def memory(self, compiled: Compiled) -> str:
        """What the largest of its programs takes, in words."""
        if jax.default_backend() != "cpu":
            return f"{gib(compiled.num_bytes)} of memory a device"
        arrays = compiled.num_bytes * self.plan.num_devices * self.plan.shards + self._saved_bytes
        return f"{gib(arrays + resident_bytes())} of memory in all"

    def release(self) -> None:
        """Lets go of what is compiled, and of environments outside: a sweep's next program needs the room."""
        del self.trainer, self.eval_env, self._init
        for traced in ("_chunk", "_evaluation"):
            vars(self).pop(traced, None)


def _share(config: Config, shards: int) -> Config:
    """The configuration of one of several devices that share the environments."""
    share = dataclasses.replace(config, num_envs=config.num_envs // shards)
    if config.num_envs % shards or share.batch_size % config.num_minibatches:
        raise ConfigError(
            f"--shard environments: --num-envs {config.num_envs} cannot be divided among {shards} "
            f"devices (JAX_NUM_CPU_DEVICES), each with --num-minibatches {config.num_minibatches}"
        )
    if config.in_sequences and share.num_envs % config.num_minibatches:
        raise ConfigError(
            f"--shard environments: the {share.num_envs} environments of a device are not divisible "
            f"by --num-minibatches {config.num_minibatches}, as sequences (--minibatches, --gru-units) need"
        )
    return share


def _check_external(
    config: Config, options: RunOptions, num_runs: int, needed: int, memory: Memory
) -> None:
    """Raises ConfigError for what environments outside of the program, which need so much, cannot do."""
    room = memory.of(1)
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
