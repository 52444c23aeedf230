"""Continuous control beside Brax's own PPO: same environments, settings, budget and machine.

    python -m benchmarks.brax_ppo
    python -m benchmarks.brax_ppo --task hopper --task "hopper, large batches" --seeds 8

Both train with the same batches, networks and coefficients, without annealing; both are evaluated
by 128 deterministic episodes. Ours trains all seeds at once and, for its speed, one alone; Brax's
trains one after another, which is all it can. Where there is an accelerator, ant alone is trained unless
another task is asked for. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import shared
from benchmarks.shared import load, save, trained
from purejaxppo.sweep import bootstrap_interval

PEER = str(Path(__file__).with_name("peer_brax.py"))
FIRST_SEED = 1000


@dataclass(frozen=True)
class Task:
    """A training in Brax's terms: batch_size * num_minibatches sequences of unroll_length steps.

    Steps are those of the agent; each is `action_repeat` steps of the environment.
    """

    env: str
    steps: int
    gamma: float
    reward_scale: float = 1.0
    ent_coef: float = 0.0
    backend: str = "spring"
    action_repeat: int = 1
    num_envs: int = 256
    unroll_length: int = 10
    batch_size: int = 64
    num_minibatches: int = 32
    updates: int = 4
    learning_rate: float = 3e-4
    clip_eps: float = 0.3
    max_grad_norm: float | None = None
    policy_layers: tuple[int, ...] = (64, 64)
    value_layers: tuple[int, ...] = (64, 64)
    recompute_advantages: bool = False  # of ours, for every epoch; Brax does for every minibatch
    evaluations: int = 5
    accelerator: bool = False  # only where there is one
    label: str = ""

    @property
    def name(self) -> str:
        """The environment, and what distinguishes two tasks of one."""
        return f"{self.env}, {self.label}" if self.label else self.env

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
            "clip-eps": self.clip_eps,
            "max-grad-norm": self.max_grad_norm or "inf",
        }
        flags = ["--no-anneal-learning-rate", "--normalize-observations"]
        flags += [f"--{'' if self.recompute_advantages else 'no-'}recompute-advantages"]
        if self.action_repeat > 1:
            flags += ["--env-args", f"action_repeat={self.action_repeat}"]
        return [x for k, v in values.items() for x in (f"--{k}", str(v))] + flags


_SMALL_BATCHES: dict[str, Any] = {"unroll_length": 20, "batch_size": 32, "num_minibatches": 8}
_RECOMPUTED: dict[str, Any] = {"unroll_length": 40, "batch_size": 16, "recompute_advantages": True}

TASKS = [
    Task("inverted_pendulum", 2_000_000, gamma=0.995),
    Task("inverted_double_pendulum", 2_000_000, gamma=0.99, reward_scale=0.1),
    Task(
        "reacher", 2_000_000, gamma=0.95, ent_coef=0.01, action_repeat=4, learning_rate=5e-4,
        clip_eps=0.2, max_grad_norm=0.5, **_SMALL_BATCHES,
    ),
    Task(
        "hopper", 1_000_000, gamma=0.999, reward_scale=0.1, ent_coef=0.01, learning_rate=2e-3,
        clip_eps=0.2, max_grad_norm=0.5, num_minibatches=16, **_RECOMPUTED,
    ),
    Task(
        "hopper", 1_000_000, gamma=0.995, reward_scale=0.1, ent_coef=0.01, learning_rate=5e-4,
        clip_eps=0.2, max_grad_norm=0.5, label="small batches", **_SMALL_BATCHES,
    ),
    Task(
        "hopper", 1_000_000, gamma=0.99, reward_scale=0.1, ent_coef=1e-3, label="large batches"
    ),
    Task(
        "walker2d", 1_000_000, gamma=0.997, reward_scale=0.1, ent_coef=0.01, learning_rate=1e-3,
        clip_eps=0.2, max_grad_norm=0.5, num_minibatches=32, **_RECOMPUTED,
    ),
    Task(
        "walker2d", 1_000_000, gamma=0.99, reward_scale=0.1, ent_coef=0.01, learning_rate=5e-4,
        clip_eps=0.2, max_grad_norm=0.5, label="small batches", **_SMALL_BATCHES,
    ),
    Task(
        "walker2d", 1_000_000, gamma=0.99, reward_scale=0.1, ent_coef=1e-3, label="large batches"
    ),
    Task(
        "ant", 10_000_000, gamma=0.97, reward_scale=10.0, ent_coef=0.01, num_envs=4096, unroll_length=5, recompute_advantages=True,
        batch_size=2048, policy_layers=(32, 32, 32, 32), value_layers=(256, 256, 256, 256, 256),
        accelerator=True, label="4096 environments",
    ),
]  # fmt: skip


# What is kept of a training beside its evaluations: of ours, and of Brax's.
_OURS = ("steps_per_second", "compile_seconds", "wall_seconds", "versions", "device")
_BRAX = ("steps_per_second", "speeds", "wall_seconds")


def name_of(result: dict[str, Any]) -> str:
    """The name of the task of a result."""
    return Task(**result["task"]).name


def ours(task: Task, num_seeds: int, first: int = FIRST_SEED) -> dict[str, Any]:
    """Evaluations [steps, returns of the seeds] and speed of one command."""
    options = [*task.options(), "--seed", first, "--num-seeds", num_seeds, "--no-compilation-cache"]
    options += ["--eval-every", task.steps // task.evaluations]
    with (
        trained(*options) as (run_dir, summary),
        (run_dir / "evaluation.csv").open() as file,
    ):
        rows = list(csv.DictReader(file))
    evaluations: dict[int, list[float]] = {}
    for row in rows:
        evaluations.setdefault(int(row["env_steps"]), []).append(float(row["return_mean"]))
    return {"evaluations": list(evaluations.items())} | {key: summary[key] for key in _OURS}


def brax(task: Task, num_seeds: int, first: int = FIRST_SEED) -> list[dict[str, Any]]:
    """What `peer_brax.py` says of each seed."""
    seeds = [str(first + i) for i in range(num_seeds)]
    command = [sys.executable, PEER, json.dumps(asdict(task)), *seeds]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(task: Task, num_seeds: int) -> dict[str, Any]:
    """Both trainers on one task."""
    alone = ours(task, 1)
    return {
        "task": asdict(task),
        "ours": ours(task, num_seeds) if num_seeds > 1 else alone,
        "ours_alone": alone,
        "brax": brax(task, num_seeds),
    }


def add_seeds(result: dict[str, Any], num_seeds: int) -> None:
    """Further seeds, of which only the returns are kept: the machine need not be idle."""
    task = Task(**result["task"])
    first = FIRST_SEED + len(result["brax"])
    further = ours(task, num_seeds, first)["evaluations"]
    for (_, returns), (_, more) in zip(result["ours"]["evaluations"], further, strict=True):
        returns += more
    for run in brax(task, num_seeds, first):
        result["brax"].append({key: run[key] for key in ("seed", "evaluations")})


def time_again(result: dict[str, Any], num_seeds: int) -> None:
    """New speeds, of so many seeds; the returns stay as they are."""
    new = measure(Task(**result["task"]), num_seeds)
    result["ours_alone"] = new["ours_alone"]
    result["ours"] |= {key: new["ours"][key] for key in _OURS}
    for run, again in itertools.zip_longest(result["brax"], new["brax"], fillvalue={}):
        for key in _BRAX:
            run.pop(key, None)
        run |= {key: again[key] for key in _BRAX if key in again}


def timed(result: dict[str, Any], key: str) -> list[float]:
    """A speed or time of Brax's seeds that have one."""
    return [run[key] for run in result["brax"] if key in run]


def curves(result: dict[str, Any]) -> dict[str, list[tuple[int, np.ndarray]]]:
    """Steps and returns [seeds] of every evaluation, for both trainers."""
    together = zip(*(run["evaluations"] for run in result["brax"]), strict=True)
    return {
        "ours": [(steps, np.array(values)) for steps, values in result["ours"]["evaluations"]],
        "Brax": [(points[0][0], np.array([p[1] for p in points])) for points in together],
    }


def return_rows(result: dict[str, Any]) -> list[str]:
    """A line for each trainer: its final returns, and their mean on the way there."""
    lines = []
    for who, curve in curves(result).items():
        final = curve[-1][1]
        low, high = bootstrap_interval(final)
        shown = ", ".join(f"{v.mean():.4g} at {steps / 1e6:.2g}M" for steps, v in curve)
        lines.append(
            f"| {name_of(result)} | {who} | {len(final)} | {final.mean():.4g} "
            f"| {low:.4g} ... {high:.4g} "
            f"| {final.min():.4g} | {shown} |"
        )
    return lines


def difference_row(result: dict[str, Any]) -> str:
    """Ours minus Brax's, and whether that is at or above it."""
    ours, peer = (curve[-1][1] for curve in curves(result).values())
    low, high = bootstrap_interval(ours - peer)
    floor = -0.05 * abs(peer.mean())
    return (
        f"| {name_of(result)} | {np.mean(ours - peer):.4g} | {low:.4g} ... {high:.4g} "
        f"| {floor:.4g} | {'yes' if low > floor else '**no**'} |"
    )


def steady_row(result: dict[str, Any]) -> str:
    """Steps per second while training."""
    alone, together = result["ours_alone"], result["ours"]
    peer = float(np.median(timed(result, "steps_per_second")))
    return speed_row(result, alone["steps_per_second"], together["steps_per_second"], peer)


def end_to_end_row(result: dict[str, Any]) -> str:
    """Steps per second with all that a command does."""
    alone, together = result["ours_alone"], result["ours"]
    (steps, _), (their_steps, _) = (curve[-1] for curve in curves(result).values())
    times = timed(result, "wall_seconds")
    peer = their_steps / float(np.median(times))
    speeds = steps / alone["wall_seconds"], steps * len(times) / together["wall_seconds"]
    return speed_row(result, *speeds, peer) + f" {alone['compile_seconds']:.0f} s |"


def speed_row(result: dict[str, Any], alone: float, together: float, peer: float) -> str:
    """Three speeds and the ratios of ours to the last."""
    return (
        f"| {name_of(result)} | {alone:,.0f} | {together:,.0f} | {peer:,.0f} "
        f"| {alone / peer:.2f} | {together / peer:.2f} |"
    )


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    jax = {result["ours"]["versions"]["jax"] for result in results}
    speeds = (
        "| environment | ours, one run | ours, all seeds at once | Brax, one run | ratio, one run "
        "| ratio, all seeds |"
    )
    lines = [
        "# Continuous control beside Brax's own PPO",
        "",
        "Made by `python -m benchmarks.brax_ppo`. Spring physics, episodes of 1,000 steps, "
        f"seeds from {FIRST_SEED}, the same settings for both (see `TASKS` there; where ours takes advantages anew "
        "it does before every epoch, Brax before every minibatch), 128 deterministic evaluation episodes. Seeds "
        "were added where few could not tell the two apart; walker2d's settings were chosen after others had "
        f"failed on the same seeds. {platform.machine()}, jax {', '.join(sorted(jax))}.",
        "",
        *(f"- {name_of(result)}: {result['ours']['device']}" for result in results),
        "",
        "| environment | | seeds | return | 95% interval | worst seed | mean return against steps |",
        "|---|---|---|---|---|---|---|",
        *(line for result in results for line in return_rows(result)),
        "",
        "Ours minus Brax's, at equal seeds; at or above where the lower end is above -5% of Brax's:",
        "",
        "| environment | difference | 95% interval | must be above | at or above |",
        "|---|---|---|---|---|",
        *map(difference_row, results),
        "",
        "Steps per second, compilation and evaluation left out (Brax compiles in its first two "
        "epochs, which are left out too):",
        "",
        speeds,
        "|---|---|---|---|---|---|",
        *map(steady_row, results),
        "",
        "Steps per second from end to end, with compilation and evaluations, of which Brax makes one more, at the start:",
        "",
        f"{speeds} ours compiles in |",
        "|---|---|---|---|---|---|---|",
        *map(end_to_end_row, results),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the benchmark and writes `results/brax_ppo.md`; what is not asked for is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append", choices=[t.name for t in TASKS])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--more", action="store_true", help="add that many seeds to what is there")
    parser.add_argument(
        "--speeds", action="store_true", help="measure speeds alone anew, of those seeds"
    )
    arguments = parser.parse_args()
    results = {name_of(result): result for result in load("brax_ppo", [])}
    wanted = arguments.task
    if not wanted:
        accelerator = shared.has_accelerator()
        wanted = [task.name for task in TASKS if task.accelerator == accelerator]
    for task in TASKS:
        if task.name not in wanted:
            continue
        if (arguments.more or arguments.speeds) and task.name not in results:
            parser.error(f"{task.name} has not been measured yet")
        if arguments.more:
            add_seeds(results[task.name], arguments.seeds)
        elif arguments.speeds:
            time_again(results[task.name], arguments.seeds)
        else:
            results[task.name] = measure(task, arguments.seeds)
        ordered = [results[task.name] for task in TASKS if task.name in results]
        text = table(ordered)
        save("brax_ppo", ordered, text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
