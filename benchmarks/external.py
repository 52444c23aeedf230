"""EnvPool's environments beside Stable-Baselines3's PPO in Gymnasium's own, with the same settings.

    python -m benchmarks.peers DIRECTORY --only sb3
    python -m benchmarks.external DIRECTORY --task Hopper-v5 --seeds 3
    python -m benchmarks.external DIRECTORY --task Breakout-v5           # speed alone

Returns are of deterministic evaluation episodes after the training; both normalise observations and
rewards. Steps per second are of whole trainings without compilation. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers
from purejaxppo import machine
from purejaxppo.config import load_settings
from purejaxppo.sweep import bootstrap_interval

RESULTS = Path(__file__).parent / "results"
FIRST_SEED = 1000


@dataclass(frozen=True)
class Task:
    """What both train.

    Attributes:
        peer_name: what Gymnasium calls it.
        steps, their_steps: of a run; where they differ only speeds are compared.
        aim: how many times the other's steps per second.
    """

    name: str
    peer_name: str
    aim: float
    steps: int = 1_000_000
    their_steps: int = 1_000_000

    @property
    def returns(self) -> bool:
        """Whether what is learned is compared."""
        return self.steps == self.their_steps


TASKS = [
    Task("HalfCheetah-v5", "HalfCheetah-v5", 5.0),
    Task("Hopper-v5", "Hopper-v5", 5.0),
    Task("Walker2d-v5", "Walker2d-v5", 5.0),
    Task("Breakout-v5", "BreakoutNoFrameskip-v4", 1.5, steps=40_960, their_steps=20_480),
]


def ours(task: Task, seed: int) -> dict[str, float]:
    """A training by the command line with the shipped settings."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "purejaxppo.run", "--env", f"envpool/{task.name}"]
        command += ["--total-timesteps", str(task.steps), "--seed", str(seed), "--eval-every", "0"]
        command += ["--run-dir", f"{name}/run"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(Path(f"{name}/run/summary.json").read_text())
    (score,) = summary["evaluation"]["return_per_run"]
    return {"steps_per_second": summary["steps_per_second"], "return": score}


def theirs(task: Task, seed: int, directory: Path) -> dict[str, float]:
    """The same by Stable-Baselines3."""
    config = load_settings(f"envpool/{task.name}").config
    batch = config.batch_size
    asked: dict[str, Any] = {
        "env": task.peer_name,
        "num_envs": config.num_envs,
        "num_steps": config.num_steps,
        "iterations": -(-task.their_steps // batch) - 1,  # after the one that warms up
        "batch_size": batch // config.num_minibatches,
        "epochs": config.update_epochs,
        "seed": seed,
        "atari": not task.returns,
        "episodes": 16 if task.returns else 0,
    }
    command = peers.command(directory, "sb3", asked)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rate, score = map(float, done.stdout.split())
    return {"steps_per_second": rate, "return": score}


def measure(task: Task, seeds: int, directory: Path) -> dict[str, Any]:
    """Both in turn, seed by seed."""
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        runs["ours"].append(ours(task, seed))
        runs["theirs"].append(theirs(task, seed, directory))
        print(task.name, seed, runs["ours"][-1], runs["theirs"][-1], flush=True)
    about = {"device": machine.device_name(), "versions": machine.versions()}
    return asdict(task) | runs | about | {"peer": peers.versions(directory, "sb3")}


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    versions = results[0]["versions"]
    lines = [
        "# EnvPool's environments",
        "",
        f"Made by `python -m benchmarks.external`: {results[0]['device']}, jax {versions['jax']}, envpool "
        f"{versions['envpool']}, Stable-Baselines3 {results[0]['peer']['stable-baselines3']}; the shipped "
        f"settings, which are the other's too, seeds from {FIRST_SEED} on, in turn. Returns of 16 "
        "deterministic episodes a seed, and 95% bootstrap intervals; at or above where the lower end of the "
        "difference is above -5% of the other's. Steps per second: medians of trainings without compilation.",
        "",
        "| environment | steps | seeds | ours | theirs | difference | at or above "
        "| our steps/s | theirs | ratio | aim |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        task = Task(**{name: r[name] for name in Task.__dataclass_fields__})
        scores, speeds = (
            {who: np.array([run[what] for run in r[who]]) for who in ("ours", "theirs")}
            for what in ("return", "steps_per_second")
        )
        cells = ["", "", "", ""]
        if task.returns:
            difference = scores["ours"] - scores["theirs"]
            low, high = bootstrap_interval(difference)
            reached = low > -0.05 * abs(scores["theirs"].mean())
            cells = [f"{scores[who].mean():.0f}" for who in ("ours", "theirs")]
            cells += [f"{difference.mean():.0f} ({low:.0f} ... {high:.0f})"]
            cells += ["yes" if reached else "**no**"]
        fast = {who: float(np.median(each)) for who, each in speeds.items()}
        lines.append(
            f"| {task.name} | {task.steps:,} | {len(r['ours'])} | {' | '.join(cells)} "
            f"| {fast['ours']:,.0f} | {fast['theirs']:,.0f} | {fast['ours'] / fast['theirs']:.1f} "
            f"| {task.aim:g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, and writes `results/external.json` and `.md`; what is not asked for is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="from benchmarks.peers")
    parser.add_argument("--task", choices=[task.name for task in TASKS], action="append")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    stored = RESULTS / "external.json"
    known = {r["name"]: r for r in json.loads(stored.read_text())} if stored.exists() else {}
    for task in TASKS:
        if given.task and task.name not in given.task:
            continue
        known[task.name] = measure(task, given.seeds, given.directory)
        ordered = [known[task.name] for task in TASKS if task.name in known]
        stored.write_text(json.dumps(ordered, indent=1) + "\n")
        stored.with_suffix(".md").write_text(table(ordered))


if __name__ == "__main__":
    main()
