"""Plays a trained policy in Gymnasium's own environment, and says what it earns there.

    pip install gymnasium
    python scripts/play_gymnasium.py RUN_DIR --episodes 100
    python scripts/play_gymnasium.py RUN_DIR --episodes 3 --render

Training saw a reimplementation in JAX; this is the original.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import gymnasium
import numpy as np

import purejaxppo
from purejaxppo.policy import Policy


def play(policy: Policy, env: gymnasium.Env[Any, Any], episodes: int, seed: int = 0) -> np.ndarray:
    """[episodes] returns; episode i starts from seed + i."""
    returns = np.zeros(episodes)
    for i in range(episodes):
        obs, _ = env.reset(seed=seed + i)
        ended, memory = False, None
        while not ended:
            action, memory = policy.step(obs, memory)
            # A number, not an array without axes, where it is one.
            obs, reward, terminated, truncated, _ = env.step(action[()])
            returns[i] += reward
            ended = terminated or truncated
    return returns


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Plays a trained policy in Gymnasium.")
    parser.add_argument("run_dir")
    parser.add_argument("--run", type=int, help="its number, in a sweep")
    parser.add_argument("--best", action="store_true", help="the best by evaluation, not the last")
    parser.add_argument("--env", help="Gymnasium's name, where it is not the one trained on")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode's start")
    parser.add_argument("--render", action="store_true", help="in a window")
    given = parser.parse_args(arguments)
    try:
        policy = purejaxppo.load_policy(given.run_dir, given.run, given.best)
    except purejaxppo.ConfigError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    name = given.env or policy.config.env
    with gymnasium.make(name, render_mode="human" if given.render else None) as env:
        returns = play(policy, env, given.episodes, given.seed)
    print(
        f"{name}: return {returns.mean():.1f} +- {returns.std():.1f} in {given.episodes} episodes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
