"""EnvPool's environments beside Stable-Baselines3's PPO in Gymnasium's own, with the same settings.

    python -m benchmarks.peers DIRECTORY --only sb3
    python -m benchmarks.external DIRECTORY --task Hopper-v5 --pairs 0 --jobs 2   # returns alone
    python -m benchmarks.external DIRECTORY --task Hopper-v5 --seeds 0            # speeds alone
    python -m benchmarks.external DIRECTORY                                       # everything

Returns are of deterministic evaluation episodes after the training; both normalise observations and
rewards. Trainings of which they are known are not repeated: more seeds add to them. Steps per second are
of shorter trainings in turn, without compilation: nothing else should be running.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers, shared
from benchmarks.shared import load, trained
from purejaxppo import machine
from purejaxppo.envs import load_settings
from purejaxppo.sweep import bootstrap_interval

FIRST_SEED = 1000
FEWEST = 3  # seeds that decide anything


@dataclass(frozen=True)
class Task:
    """What both train.

    Attributes:
        peer_name: what Gymnasium calls it.
        aim: how many times the other's steps per second.
        steps: of trainings whose returns are compared; 0 where only speeds are.
        timed_steps, their_timed_steps: of trainings whose speeds are compared.
    """

    name: str
    peer_name: str
    aim: float
    steps: int = 1_000_000
    timed_steps: int = 204_800
    their_timed_steps: int = 20_480


@dataclass(frozen=True)
class Measured:
    """Of one training."""

    steps_per_second: float
    score: float


Training = Callable[[Task, int, int], Measured]  # of a task, a seed and so many steps

TASKS = [
    Task("HalfCheetah-v5", "HalfCheetah-v5", 5.0),
    Task("Hopper-v5", "Hopper-v5", 5.0),
    Task("Walker2d-v5", "Walker2d-v5", 5.0),
    Task("Breakout-v5", "BreakoutNoFrameskip-v4", 1.5, steps=0, timed_steps=40_960),
]


def common_settings(task: Task) -> dict[str, float]:
    """Those beside sizes that both trainers call the same, as ours are shipped."""
    hyper = load_settings(f"envpool/{task.name}").hyper
    return {name: getattr(hyper, name) for name in ("learning_rate", "gamma", "gae_lambda")}


def without_others(before: dict[str, Any], common: dict[str, float]) -> dict[str, Any]:
    """What is known of a task, without returns that other settings reached."""
    same = before.get("common") == common
    returns = before["returns"] if same else {"ours": {}, "theirs": {}}
    return before | {"returns": returns, "common": common}


def ours(task: Task, seed: int, steps: int) -> Measured:
    """A training by the command line with the shipped settings."""
    options = ("--env", f"envpool/{task.name}", "--total-timesteps", steps, "--seed", seed)
    with trained(*options, "--eval-every", 0, "--compile-effort", "full") as (_, summary):
        (score,) = summary["evaluation"]["return_per_run"]
        return Measured(summary["steps_per_second"], score)


def theirs(task: Task, seed: int, steps: int, directory: Path, jobs: int) -> Measured:
    """The same by Stable-Baselines3, one of `jobs` at once."""
    config = load_settings(f"envpool/{task.name}").config
    batch = config.batch_size
    asked: dict[str, Any] = {
        "env": task.peer_name,
        "num_envs": config.num_envs,
        "num_steps": config.num_steps,
        "iterations": -(-steps // batch) - 1,  # after the one that warms up
        "batch_size": batch // config.num_minibatches,
        "epochs": config.update_epochs,
        "seed": seed,
        "atari": not config.normalize_observations,
        "episodes": 16 if config.normalize_observations else 0,
        "hyper": common_settings(task),
    }
    command = peers.command(directory, "sb3", asked)
    threads = {"OMP_NUM_THREADS": "1"} if jobs > 1 else {}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | threads
    )
    return Measured(*map(float, done.stdout.split()))


def measure_returns(
    known: dict[str, Any],
    trainings: dict[str, Training],
    seeds: int,
    jobs: int,
    save: Callable[[], None],
) -> None:
    """Adds the returns that are not known yet, and saves after each training.

    Args:
        known: by task's name `returns`, of each of the trainings, by seed.
        jobs: trainings at once.
    """
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(train, task, seed, task.steps): (task.name, who, str(seed))
            for task in TASKS
            if task.name in known and task.steps
            for seed in range(FIRST_SEED, FIRST_SEED + seeds)
            for who, train in trainings.items()
            if str(seed) not in known[task.name]["returns"][who]
        }
        for done in as_completed(running):
            name, who, seed = running[done]
            print(name, who, seed, done.result(), flush=True)
            known[name]["returns"][who][seed] = done.result().score
            save()


def measure_speeds(
    task: Task, trainings: dict[str, Training], pairs: int
) -> dict[str, list[float]]:
    """Steps per second of each, in turn."""
    steps = {"ours": task.timed_steps, "theirs": task.their_timed_steps}
    speeds: dict[str, list[float]] = {who: [] for who in trainings}
    for seed in range(FIRST_SEED, FIRST_SEED + pairs):
        for who, train in trainings.items():
            speeds[who].append(train(task, seed, steps[who]).steps_per_second)
            print(task.name, who, speeds[who][-1], flush=True)
    return speeds


def scores(returns: dict[str, dict[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Ours and theirs [seeds], of the seeds that both have."""
    ours, theirs = returns["ours"], returns["theirs"]
    seeds = sorted(ours.keys() & theirs.keys())
    return np.array([ours[seed] for seed in seeds]), np.array([theirs[seed] for seed in seeds])


def _returns(returns: dict[str, dict[str, float]]) -> list[str]:
    """Cells of the table: seeds, ours, theirs, difference, at or above."""
    ours, theirs = scores(returns)
    if not len(ours):
        return [""] * 5
    low, high = bootstrap_interval(ours - theirs)
    reached = "yes" if low > -0.05 * abs(theirs.mean()) else "**no**"
    return [
        str(len(ours)),
        *(f"{each.mean():.0f}" for each in (ours, theirs)),
        f"{(ours - theirs).mean():.0f} ({low:.0f} ... {high:.0f})",
        reached if len(ours) >= FEWEST else "too few seeds",
    ]


def _speeds(speeds: dict[str, list[float]]) -> list[str]:
    """Cells of the table: ours, theirs, ratio."""
    if not speeds:
        return [""] * 3
    fast = {who: float(np.median(each)) for who, each in speeds.items()}
    return [
        f"{fast['ours']:,.0f}",
        f"{fast['theirs']:,.0f}",
        f"{fast['ours'] / fast['theirs']:.1f}",
    ]


def table(known: dict[str, Any]) -> str:
    """The results as Markdown."""
    about = next(iter(known.values()))
    lines = [
        "# EnvPool's environments",
        "",
        f"Made by `python -m benchmarks.external`: jax {about['versions']['jax']}, envpool "
        f"{about['versions']['envpool']}, Stable-Baselines3 {about['peer']['stable-baselines3']}; the shipped "
        f"settings, which are the other's too, seeds from {FIRST_SEED} on. Returns of 16 deterministic "
        "episodes a seed, and 95% bootstrap intervals; at or above where the lower end of the difference is "
        "above -5% of the other's. Seeds were added where their returns lie far apart. Steps per second: medians of trainings in turn, without compilation.",
        "",
        "| environment | steps | seeds | ours | theirs | difference | at or above "
        "| our steps/s | theirs | ratio | aim | speeds on |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        if task.name in known:
            steps = f"{task.steps:,}" if task.steps else ""
            cells = [task.name, steps, *_returns(known[task.name]["returns"])]
            cells += [
                *_speeds(known[task.name]["speeds"]),
                f"{task.aim:g}",
                known[task.name]["device"],
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, and writes `results/external.json` and `.md`; what is not asked for is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="from benchmarks.peers")
    parser.add_argument("--task", choices=[task.name for task in TASKS], action="append")
    parser.add_argument("--seeds", type=int, default=3, help="of the returns")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, of the returns")
    parser.add_argument("--pairs", type=int, default=3, help="of the speeds")
    given = parser.parse_args()
    tasks = [task for task in TASKS if not given.task or task.name in given.task]
    trainings: dict[str, Training] = {
        "ours": ours,
        "theirs": functools.partial(theirs, directory=given.directory, jobs=given.jobs),
    }
    known = load("external", {})
    about = {"versions": machine.versions(), "peer": peers.versions(given.directory, "sb3")}

    def save() -> None:
        shared.save("external", known, table(known))

    for task in tasks:
        before = known.get(task.name, {"speeds": {}, "device": ""})
        known[task.name] = without_others(before, common_settings(task)) | about
    measure_returns(
        {task.name: known[task.name] for task in tasks}, trainings, given.seeds, given.jobs, save
    )
    for task in tasks:
        if given.pairs:
            known[task.name]["speeds"] = measure_speeds(task, trainings, given.pairs)
            known[task.name]["device"] = machine.device_name()
            save()


if __name__ == "__main__":
    main()
