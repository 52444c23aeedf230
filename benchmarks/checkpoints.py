"""What checkpoints cost: one save of 1 and of 256 runs, and a whole training with and without them.

    python -m benchmarks.checkpoints
    python -m benchmarks.checkpoints --minutes 5 --every 60 --pairs 3    # as they are by default

Trainings of five minutes differ by more than five saves cost. So a short one saves far more often: what
its many saves take, with the start of Orbax and the wait at the end, bounds what a few take. Nothing else
should be running.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.shared import RESULTS, trained
from purejaxppo import machine
from purejaxppo.checkpoint import Writer, flatten
from purejaxppo.config import RunOptions
from purejaxppo.envs import load_settings
from purejaxppo.plan import make_plan
from purejaxppo.sweep import bootstrap_interval
from purejaxppo.train import Trainer, make_setup, run_shapes, saved_shapes, stack_hypers

ENV = "CartPole-v1"
SAVES = 7  # the first of which imports Orbax


def one_save(num_runs: int) -> dict[str, list[float]]:
    """Seconds that saves of freshly begun runs block and take, and the bytes they hold."""
    settings = load_settings(ENV)
    setup = make_setup(settings.config)
    trainer = Trainer(setup, make_plan(setup, num_runs))
    hypers = trainer.shard(stack_hypers([settings.hyper] * num_runs))
    whole = saved_shapes(run_shapes(setup, settings.hyper), num_runs)
    measured: dict[str, list[float]] = {"blocking": [], "total": [], "bytes": []}
    with (
        tempfile.TemporaryDirectory() as directory,
        Writer(Path(directory), settings.run.keep, {}) as writer,
    ):
        for i in range(SAVES):
            seeds = trainer.shard(np.arange(num_runs, dtype=np.uint32))
            states = jax.block_until_ready(trainer.init(seeds, hypers, ()))
            started = time.perf_counter()
            arrays = flatten("state", trainer.fetch_whole(states, whole))
            writer.save(arrays, {"iteration": i})
            measured["blocking"].append(time.perf_counter() - started)
            writer.wait()
            measured["total"].append(time.perf_counter() - started)
            measured["bytes"].append(sum(x.nbytes for x in arrays.values()))
    return {name: values[1:] for name, values in measured.items()}


def whole_training(steps: int, *arguments: str) -> float:
    """Seconds from the first compiled step to the end of the process."""
    options = ("--env", ENV, "--total-timesteps", steps, "--eval-every", 0, *arguments)
    with trained(*options) as (_, summary):
        return summary["wall_seconds"] - summary["compile_seconds"]


def main() -> None:
    """Runs the benchmark and writes `results/checkpoints.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each training")
    parser.add_argument("--every", type=int, default=2, help="seconds between saves")
    parser.add_argument("--pairs", type=int, default=6, help="of trainings, alternating")
    given = parser.parse_args()
    machine.configure(dataclasses.replace(RunOptions(), num_seeds=256), 256)
    saves = {num_runs: one_save(num_runs) for num_runs in (1, 256)}
    probe = 2_000_000
    rate = probe / whole_training(probe, "--keep", "0")
    steps = int(rate * 60 * given.minutes)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(given.pairs):
        times["with"].append(whole_training(steps, "--checkpoint-every", str(given.every)))
        times["without"].append(whole_training(steps, "--keep", "0"))
    text = table(saves, times, steps, given.every)
    (RESULTS / "checkpoints.md").write_text(text)
    print(text)


def table(
    saves: dict[int, dict[str, list[float]]], times: dict[str, list[float]], steps: int, every: int
) -> str:
    """The results as Markdown."""
    lines = [
        "# What checkpoints cost",
        "",
        f"Made by `python -m benchmarks.checkpoints`: {ENV} with its shipped settings, "
        f"{machine.device_name()}, {platform.machine()}, jax {jax.__version__}. One save, median and "
        f"range of {SAVES - 1} after the first, which imports Orbax in the background:",
        "",
        "| runs | size | training waits | range | until it is on disk | range |",
        "|---|---|---|---|---|---|",
    ]
    for num_runs, measured in saves.items():
        cells = [f"{np.median(measured['bytes']) / 2**20:.2f} MiB"]
        for name in ("blocking", "total"):
            milliseconds = 1000 * np.array(measured[name])
            cells += [f"{np.median(milliseconds):.1f} ms"]
            cells += [f"{milliseconds.min():.1f} ... {milliseconds.max():.1f} ms"]
        lines.append(f"| {num_runs} | {' | '.join(cells)} |")
    more = np.subtract(times["with"], times["without"])
    low, high = bootstrap_interval(more)
    lines += [
        "",
        f"A training of one run for {steps:,} steps, compilation left out, alternating:",
        "",
        "| checkpoints | seconds |",
        "|---|---|",
        f"| every {every} s and at the end | {', '.join(f'{x:.1f}' for x in times['with'])} |",
        f"| none | {', '.join(f'{x:.1f}' for x in times['without'])} |",
        "",
        f"All the saves of such a training, {np.mean(times['with']) / every:.0f} of them, with the start "
        f"of Orbax and the wait for the last, take {np.mean(more):.2f} s (95% interval {low:.2f} ... "
        f"{high:.2f}). Five minutes with a save every minute, as by default, have fewer: they are slower "
        f"by less than {100 * np.mean(more) / 300:.1f}% ({100 * high / 300:.1f}% at the upper end).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
