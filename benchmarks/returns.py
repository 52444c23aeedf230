"""The README's table of returns, from what `learning`, `external` and `brax_ppo` have stored.

`python -m benchmarks.returns` draws it, once they have measured something anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks import brax_ppo, external
from benchmarks.shared import README, load, with_table
from benchmarks.targets import SUITES
from purejaxppo.sweep import bootstrap_interval

# Environments that others report returns of; all are in the suites' own tables.
SHOWN = {
    "gymnax": [
        "CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0",
    ],
    "minatar": [
        "Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "SpaceInvaders-MinAtar",
    ],
    "envpool": ["envpool/LunarLander-v3", "envpool/Pong-v5"],
}  # fmt: skip


class Row(NamedTuple):
    """Of one environment.

    Attributes:
        returns: [seeds], after so many steps.
        others: what others reach, in words.
    """

    env: str
    steps: int
    returns: np.ndarray
    others: str


def rows() -> Iterator[Row]:
    """What the README shows of learning."""
    for suite, names in SHOWN.items():
        known = {result["env"]: result for result in load(suite, [])}
        for name in names:
            returns = np.array(known[name]["returns"])
            yield Row(name, known[name]["steps"], returns, SUITES[suite][name].others)
    beside_sb3 = load("external", {})
    for task in external.TASKS:
        if task.steps:
            ours, theirs = external.scores(beside_sb3[task.name]["returns"])
            others = f"{_shown(theirs)}, Stable-Baselines3"
            yield Row(f"envpool/{task.name}", task.steps, ours, others)
    for result in load("brax_ppo", []):
        task = brax_ppo.Task(**result["task"])
        if not task.label:
            ours, theirs = (curve[-1][1] for curve in brax_ppo.curves(result).values())
            others = f"{_shown(theirs)}, Brax's PPO"
            yield Row(f"brax/{task.env}, {task.backend}", task.steps, ours, others)


def _shown(returns: np.ndarray) -> str:
    """Their mean, and the interval of that."""
    low, high = bootstrap_interval(returns)
    return f"{returns.mean():.4g} ({low:.4g} ... {high:.4g})"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| environment | steps | seeds | return | others |", "|---|---|---|---|---|"]
    for row in rows():
        lines.append(
            f"| {row.env} | {row.steps:,} | {len(row.returns)} | {_shown(row.returns)} | {row.others} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), "returns", table()))
