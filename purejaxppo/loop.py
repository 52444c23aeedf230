"""The loop around one compiled program, on the host: chunks, evaluations, and the books between."""

from __future__ import annotations

import gc
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from purejaxppo import machine
from purejaxppo.checkpoint import Best, Checkpoint, Writer, finite, flatten
from purejaxppo.config import RunOptions
from purejaxppo.display import Display
from purejaxppo.loggers import EvaluationTable, MetricsTable, Tables, blank_diverged, pool
from purejaxppo.machine import Interrupt, Memory
from purejaxppo.plan import MAX_CHUNK
from purejaxppo.policy import Policy, acting
from purejaxppo.processes import agree
from purejaxppo.program import Program
from purejaxppo.rollouts import num_microbatches
from purejaxppo.sweep import Run
from purejaxppo.types import Metrics, PyTree, TrainState

# A chunk lasts about so long, so that progress moves and Ctrl-C is heard.
_CHUNK_SECONDS = 0.5


class Training:
    """The runs that share a compiled program, from the first iteration to the last evaluation.

    Args:
        runs, memory: see `Program`.
        checkpoint: to go on from.

    Attributes:
        seconds: of training alone; this and the next three also of what was before the checkpoint.
        compile_seconds: of compilation.
        evaluation_seconds: of evaluations, and of the rows that were written meanwhile.
        wall_seconds: of all from compilation to the last checkpoint.

    Raises:
        ConfigError: as `Program`, or a checkpoint of something else.
    """

    def __init__(
        self,
        options: RunOptions,
        runs: list[Run],
        display: Display,
        memory: Memory,
        checkpoint: Checkpoint | None = None,
        block: int | None = None,
    ) -> None:
        self.options, self.runs, self.display = options, runs, display
        self.config = runs[0].setting.config
        effort, begun = None, 0
        if checkpoint is not None:
            facts, begun = checkpoint.facts, checkpoint.iteration
            block = facts["block"]
            device = machine.device_name()
            (moved,) = agree(facts.get("device", device) != device)  # of any process
            if not moved and facts["iterations"] == self.config.iterations:
                effort = facts.get("effort", "full")  # as older versions always compiled
        every = options.eval_every
        self._every = self._iterations(self.config.total_timesteps / 20 if every is None else every)
        # What depends on the length of the training stays as it was begun.
        if checkpoint is not None and every is None:
            self._every = checkpoint.facts["every"]
        evaluations = math.ceil(self.config.iterations / self._every)
        self.program = Program(options, runs, memory, block, effort, begun, evaluations)
        if options.video_every:
            from purejaxppo.render import find_sketch  # takes its time to import

            find_sketch(self.program.env, self.config.env)
        rows = options.metrics_rows
        self._interval = -(-self.config.iterations // rows) if rows else 1
        self._pending: dict[str, np.ndarray] = {}
        self._rows = {"metrics.csv": 0, "evaluation.csv": 0}
        self._best = Best(acting(self.program.whole), len(runs))
        self._diverged = np.zeros(len(runs), bool)
        self.iteration = self._saved = 0
        self.seconds = self.compile_seconds = self.evaluation_seconds = self.wall_seconds = 0.0
        self._restored: PyTree = None
        self._running: tuple[int, Metrics] | None = None  # the chunk on its way
        self._chunk_size = 1
        self._told_of_invalid = False
        if checkpoint is not None:
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Takes up where a checkpoint was made."""
        facts = checkpoint.facts
        self.iteration = self._saved = checkpoint.iteration
        self.seconds = facts["seconds"]
        self.compile_seconds = facts.get("compile_seconds", 0.0)  # which older versions forgot
        self.evaluation_seconds = facts.get("evaluation_seconds", 0.0)
        self.wall_seconds = facts.get("wall_seconds", self.seconds)
        self._diverged[facts["diverged"]] = True
        if self.done:
            return
        self._restored = checkpoint.tree("state", self.program.whole)
        self._best.tree = checkpoint.tree("best", self._best.tree)
        self._pending = checkpoint.named("pending")
        self._rows = {name: kept["rows"] for name, kept in facts["tables"].items()}
        if self.options.metrics_rows == facts["metrics_rows"]:  # as it was begun, too
            self._interval = facts["interval"]

    @property
    def done(self) -> bool:
        """Whether there is nothing left to train."""
        return self.iteration == self.config.iterations

    @property
    def steps(self) -> int:
        """Environment steps so far, of all runs."""
        return self.iteration * self.config.batch_size * len(self.runs)

    @property
    def evaluation_facts(self) -> dict[str, Any]:
        """What an evaluation depends on beside the policy."""
        return {
            "episodes": self.options.eval_episodes,
            "sampled": self.options.eval_sampled,
            "effort": self.program.evaluation_effort,
        }

    @property
    def layout(self) -> dict[str, Any]:
        """What decides how numbers are rounded, beside the device."""
        plan = self.program.plan
        return {
            "block": plan.block,
            "shards": plan.shards,
            "processes": plan.summing_processes,
            "effort": self.program.effort,
            "microbatches": num_microbatches(self.program.trainer.setup),
        }

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
        if self.done:
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
        self._began = time.monotonic() - self.wall_seconds
        # A GPU's program blocks who starts it until its last loop of unknown length is through.
        with ThreadPoolExecutor(1) as self._starter:
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
        started, program = time.monotonic(), self.program
        begins = self._restored is None or program.external
        compiled = program.compile(begins)
        self._chunk, self._evaluate = compiled.chunk, compiled.evaluate
        begun = None
        if compiled.init is not None:
            program.trainer.setup.env.prepare()
            begun = self._states = compiled.init(*program.start)
        if self._restored is not None:
            self._states = program.trainer.put_whole(self._restored, program.shapes)
            self._restored = None
            if begun is not None:  # what lives outside of the program has begun anew
                self._states = _with_environments(self._states, begun)
        memory = program.memory(compiled)
        seconds = time.monotonic() - started
        self.compile_seconds += seconds
        gc.freeze()
        gc.enable()
        quick = ", quickly (--compile-effort full trains faster)" * (program.effort == "quick")
        how = "loaded as compiled before, in" if compiled.loaded else "compiled in"
        self.display.say(f"{how} {seconds:.1f} s{quick}, {memory}")

    def _train(self) -> None:
        total = self.config.iterations
        every = self._every if self._evaluate else total
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
        self._diverged |= ~finite(self._fetch_policies()["params"])
        self._save()
        del self._states, self._chunk, self._evaluate
        self.program.release()

    def _iterations(self, steps: float) -> int:
        """So many environment steps in iterations, rounded up; all of them for none."""
        return math.ceil(steps / self.config.batch_size) if steps else self.config.iterations

    def _until(self, *every: int) -> int:
        """The next iteration that is a multiple of one of these, or the last one of all."""
        return min(self.config.iterations, *((self.iteration // n + 1) * n for n in every))

    def _checkpoint_due(self, seconds: float) -> bool:
        """Whether to save, so many seconds after the last time; the last one waits for the last rows."""
        if self.done:
            return False
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
        states = self.program.trainer.fetch_whole(self._states, self.program.whole)
        if not finite(states.params).any():
            return
        self._best.update(acting(states), self.iteration)
        self._saved = self.iteration
        if self._writer is None:
            return
        self._tables.sync()
        arrays = flatten("state", states) | flatten("pending", self._metrics.pending)
        self._writer.save(arrays | flatten("best", self._best.tree), self._facts())

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint says beside its arrays."""
        return {
            "iteration": self.iteration,
            "interval": self._interval,
            "metrics_rows": self.options.metrics_rows,
            "every": self._every,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "wall_seconds": time.monotonic() - self._began,
            "diverged": np.flatnonzero(self._diverged).tolist(),
            "tables": {
                "metrics.csv": {"until": self._metrics.until, "rows": self._metrics.rows},
                "evaluation.csv": {"until": self.iteration, "rows": self._evaluations.rows},
            },
            "devices": self.program.plan.one_or_several,
            **self.layout,
            "evaluation": self.evaluation_facts,
            "iterations": self.config.iterations,
        }

    def _train_chunk(self, count: int) -> None:
        """Starts `count` iterations; while they run, those before are written down."""
        if self._running is None:
            self._since = time.monotonic()
        shared = (np.int32(count), np.float32(self.config.iterations))
        running = self._starter.submit(self._chunk, self._states, self.program.hypers, shared)
        self.iteration += count
        self._finish_chunk()  # the one before, while this one runs
        self._states, metrics = running.result()
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
        chunk = self.program.trainer.fetch(chunk, donated=False)
        now = time.monotonic()
        (seconds,) = agree(now - self._since)  # all processes must do the same
        self._since = now
        self.seconds += seconds
        self._chunk_size = max(1, int(_CHUNK_SECONDS * count / seconds))
        metrics = {name: array[..., :count].T for name, array in vars(chunk).items()}
        if self.program.plan.shards > 1:  # [C, D, R], of each device's environments
            metrics = pool({name: np.moveaxis(array, 1, 0) for name, array in metrics.items()})
        metrics = blank_diverged(metrics, self.config.batch_size)
        self._metrics.add(metrics)
        losses = metrics["policy_loss"] + metrics["value_loss"] + metrics["grad_norm"]
        self._diverged |= ~np.isfinite(losses).all(axis=0)
        self._tell_of_invalid(metrics["invalid_steps"])
        returns = pool(metrics)["episode_return"]
        mean = float(np.nanmean(returns)) if np.isfinite(returns).any() else math.nan
        done = self._metrics.iteration * self.config.batch_size
        self.display.update(done, mean, done * len(self.runs) / self.seconds)

    def _tell_of_invalid(self, steps: np.ndarray) -> None:
        """Once, where the environments gave invalid steps [C, R], and not only reset themselves late."""
        counts = np.where(self._diverged, 0, steps.sum(0))
        if self._told_of_invalid or self.program.external or not counts.any():
            return
        self._told_of_invalid = True
        run, count = self.runs[counts.argmax()], counts.max()
        self.display.say(
            f"{run.name}: {count:,} of {len(steps) * self.config.batch_size:,} steps were invalid and are left "
            "out: an observation or reward that is no number, or too large to be squared, or a truncation "
            "without may_truncate"
        )

    def _evaluate_now(self) -> None:
        assert self._evaluate is not None
        started = time.monotonic()
        self.program.eval_env.prepare()
        running = self._starter.submit(self._evaluate, self._states, self.program.hypers, ())
        self._finish_chunk()  # its rows are written while the evaluation runs
        episodes = self.program.trainer.fetch(running.result())
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
        # It began when the chunk before it was done.
        self.evaluation_seconds += time.monotonic() - max(started, self._since)

    def _fetch_policies(self) -> dict[str, PyTree]:
        """Host arrays [R, ...] of what acts now."""
        states, whole = acting(self._states), acting(self.program.whole)
        return self.program.trainer.fetch_whole(states, whole)

    def _draw(self) -> None:
        """A video of the first run as it is now."""
        from purejaxppo.render import render

        self._finish_chunk()
        saved = self._fetch_policies()
        run, own = self.runs[0], jax.tree.map(lambda x: x[0], saved)
        if self._writer is None or not finite(saved["params"])[0]:
            return
        agent = self.program.trainer.setup.agent
        policy = Policy(
            run, self.program.env, agent, own["params"], own["obs_stats"], self.iteration
        )
        self._videos.mkdir(exist_ok=True)
        steps = self.iteration * self.config.batch_size
        path = self._videos / f"run{run.number}-{steps:012d}.gif"
        try:
            render(policy, path, episodes=1, sampled=self.options.eval_sampled)
        except Exception as error:  # a film is not worth a training, whatever its environment draws
            self.display.say(f"no video: {type(error).__name__}: {error}")
        else:
            self._tables.video(run.number, steps, path)


def _with_environments(states: TrainState, begun: TrainState) -> TrainState:
    """States whose environments, and the returns of their episodes so far, are those of others."""
    return_stats = states.return_stats
    if return_stats is not None and begun.return_stats is not None:
        return_stats = return_stats.replace(trace=begun.return_stats.trace)
    return states.replace(env_state=begun.env_state, first=begun.first, return_stats=return_stats)
