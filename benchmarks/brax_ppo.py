"""Continuous control beside Brax's own PPO: same environments, settings, budget and machine.

    python -m benchmarks.brax_ppo
    python -m benchmarks.brax_ppo --env hopper --seeds 4

Both train with the same batches, networks and coefficients, without annealing; both are evaluated
by 128 deterministic episodes. Ours trains all seeds at once and, for its speed, one alone; Brax's
trains one after another, which is all it can. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from purejaxppo.report import bootstrap_interval

RESULTS = Path(__file__).parent / "results"
PEER = str(Path(__file__).with_name("peer_brax.py"))
FIRST_SEED = 1000


@dataclass(frozen=True)
class Task:
    """A training in Brax's terms: batch_size * num_minibatches sequences of unroll_length steps."""

    env: str
    steps: int
    gamma: float
    reward_scale: float = 1.0
    ent_coef: float = 0.0
    backend: str = "spring"
    num_envs: int = 256
    unroll_length: int = 10
    batch_size: int = 64
    num_minibatches: int = 32
    updates: int = 4
    learning_rate: float = 3e-4
    policy_layers: tuple[int, ...] = (64, 64)
    value_layers: tuple[int, ...] = (64, 64)
    evaluations: int = 5

    @property
    def num_steps(self) -> int:
        """Steps of an environment between updates."""
        return self.batch_size * self.num_minibatches // self.num_envs * self.unroll_length

    def options(self) -> list[str]:
        """The same for our command line."""
        values = {
            "env": f"brax/{self.env}",
            "backend": self.backend,
            "total-timesteps": self.steps,
            "num-envs": self.num_envs,
            "num-steps": self.num_steps,
            "num-minibatches": self.num_minibatches,
            "update-epochs": self.updates,
            "torso-layers": "",
            "policy-layers": ",".join(map(str, self.policy_layers)),
            "value-layers": ",".join(map(str, self.value_layers)),
            "activation": "swish",
            "action-distribution": "tanh_gaussian",
            "log-std": "state",
            "learning-rate": self.learning_rate,
            "gamma": self.gamma,
            "gae-lambda": 0.95,
            "reward-scale": self.reward_scale,
            "ent-coef": self.ent_coef,
            "vf-coef": 0.5,
            "clip-eps": 0.3,
            "max-grad-norm": "inf",
        }
        flags = ["--no-anneal-learning-rate", "--normalize-observations"]
        return [x for k, v in values.items() for x in (f"--{k}", str(v))] + flags


TASKS = [
    Task("inverted_pendulum", 2_000_000, gamma=0.995),
    Task("inverted_double_pendulum", 2_000_000, gamma=0.99, reward_scale=0.1),
    Task("reacher", 2_000_000, gamma=0.95, reward_scale=5.0, ent_coef=1e-3),
    Task("hopper", 1_000_000, gamma=0.99, ent_coef=0.01),
    Task("walker2d", 1_000_000, gamma=0.99, ent_coef=0.01),
]


def ours(task: Task, num_seeds: int, *options: str) -> dict[str, Any]:
    """Evaluations [steps, returns of the seeds] and speed of one command."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "purejaxppo.run", *task.options()]
        command += ["--seed", str(FIRST_SEED), "--num-seeds", str(num_seeds), *options]
        command += ["--eval-every", str(task.steps // task.evaluations)]
        command += ["--run-dir", str(run_dir), "--no-compilation-cache"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((run_dir / "summary.json").read_text())
        with (run_dir / "evaluation.csv").open() as file:
            rows = list(csv.DictReader(file))
    evaluations: dict[int, list[float]] = {}
    for row in rows:
        evaluations.setdefault(int(row["env_steps"]), []).append(float(row["return_mean"]))
    keys = ("steps_per_second", "compile_seconds", "wall_seconds", "versions", "device")
    return {"evaluations": list(evaluations.items())} | {key: summary[key] for key in keys}


def brax(task: Task, num_seeds: int) -> list[dict[str, Any]]:
    """What `peer_brax.py` says of each seed."""
    seeds = [str(FIRST_SEED + i) for i in range(num_seeds)]
    command = [sys.executable, PEER, json.dumps(asdict(task)), *seeds]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(task: Task, num_seeds: int) -> dict[str, Any]:
    """Both trainers on one task."""
    return {
        "task": asdict(task),
        "ours": ours(task, num_seeds),
        "ours_alone": ours(task, 1),
        "brax": brax(task, num_seeds),
    }


def rows(result: dict[str, Any]) -> list[str]:
    """Lines of the tables: returns against steps, and speed."""
    task, seeds = result["task"], len(result["brax"])
    curves = {
        "ours": [(steps, np.array(values)) for steps, values in result["ours"]["evaluations"]],
        "Brax": [
            (points[0][0], np.array([point[1] for point in points]))
            for points in zip(*(run["evaluations"] for run in result["brax"]), strict=True)
        ],
    }
    lines = []
    for who, curve in curves.items():
        low, high = bootstrap_interval(curve[-1][1])
        shown = ", ".join(f"{v.mean():.4g} at {steps / 1e6:.2g}M" for steps, v in curve)
        lines.append(
            f"| {task['env']} | {who} | {curve[-1][1].mean():.4g} | {low:.4g} ... {high:.4g} "
            f"| {curve[-1][1].min():.4g} | {shown} |"
        )
    difference = curves["ours"][-1][1] - curves["Brax"][-1][1]
    floor = -0.05 * abs(curves["Brax"][-1][1].mean())
    low, high = bootstrap_interval(difference)
    verdict = "yes" if low > floor else "**no**"
    peer = float(np.median([run["steps_per_second"] for run in result["brax"]]))
    overhead = np.median([r["wall_seconds"] - task["steps"] / peer for r in result["brax"]])
    alone, together = result["ours_alone"], result["ours"]
    speed = (
        f"| {task['env']} | {alone['steps_per_second']:,.0f} | {together['steps_per_second']:,.0f} "
        f"| {peer:,.0f} | {alone['steps_per_second'] / peer:.2f} "
        f"| {together['steps_per_second'] / peer:.2f} "
        f"| {alone['compile_seconds']:.0f} s | {overhead:.0f} s |"
    )
    compared = (
        f"| {task['env']} | {difference.mean():.4g} | {low:.4g} ... {high:.4g} | {floor:.4g} "
        f"| {verdict} |"
    )
    return [*lines, compared, speed, str(seeds)]


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    parts = [rows(result) for result in results]
    first = results[0]["ours"]
    versions = first["versions"]
    lines = [
        "# Continuous control beside Brax's own PPO",
        "",
        "Made by `python -m benchmarks.brax_ppo`. Spring physics, episodes of 1,000 steps, "
        f"{parts[0][-1]} seeds from {FIRST_SEED}, the same settings for both (see `TASKS` there), 128 "
        f"deterministic evaluation episodes. {first['device']}, {platform.machine()}, "
        f"jax {versions['jax']}.",
        "",
        "| environment | | return | 95% interval | worst seed | mean return against steps |",
        "|---|---|---|---|---|---|",
        *(line for part in parts for line in part[:2]),
        "",
        "Ours minus Brax's, at equal seeds; at or above where the lower end is above -5% of Brax's:",
        "",
        "| environment | difference | 95% interval | must be above | at or above |",
        "|---|---|---|---|---|",
        *(part[2] for part in parts),
        "",
        "Steps per second of whole trainings, compilation and evaluation left out. Brax's last "
        "column is all else in its run: compilation, resets and evaluations.",
        "",
        "| environment | ours, one run | ours, all seeds at once | Brax, one run | ratio, one run "
        "| ratio, all seeds | ours compiles in | Brax's rest |",
        "|---|---|---|---|---|---|---|---|",
        *(part[3] for part in parts),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the benchmark and writes `results/brax_ppo.md`; what is not asked for is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    tasks = {task.env: task for task in TASKS}
    parser.add_argument("--env", action="append", choices=tasks, help="may be repeated")
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    stored = RESULTS / "brax_ppo.json"
    known = {r["task"]["env"]: r for r in json.loads(stored.read_text())} if stored.exists() else {}
    for name in arguments.env or tasks:
        known[name] = measure(tasks[name], arguments.seeds)
        ordered = [known[env] for env in tasks if env in known]
        stored.write_text(json.dumps(ordered, indent=1) + "\n")
        text = table(ordered)
        stored.with_suffix(".md").write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
